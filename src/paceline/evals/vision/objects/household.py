"""Things of the house."""

from paceline.evals.vision.drawing import Pen, shade
from paceline.evals.vision.objects.kinds import (
    BLACK,
    BLUE,
    BRIGHT,
    BROWN,
    DARK,
    GREEN,
    GREY,
    ORANGE,
    RED,
    SILVER,
    TAN,
    WHITE,
    YELLOW,
    kind,
)  # fmt: skip


@kind("cup", "house", BRIGHT)
def cup(p: Pen, c: str) -> None:
    p.path("M72 36 C104 28 104 78 70 74", stroke=shade(c, -0.15), width=8)
    p.path("M10 20 L16 84 Q44 98 72 84 L78 20", c)
    p.oval(44, 20, 34, 10, shade(c, -0.2))
    p.oval(44, 22, 28, 7, "#5b3a21", line=False)


@kind("lamp", "house", (YELLOW, RED, GREEN, BLUE))
def lamp(p: Pen, c: str) -> None:
    p.box(46, 48, 8, 40, BROWN)
    p.path("M26 96 Q28 84 50 84 Q72 84 74 96 L26 96", BROWN)
    p.path("M64 52 L64 66", stroke=DARK, width=1.6)
    p.poly("34 6 66 6 88 54 12 54", c)
    p.path("M42 8 L30 52 M58 8 L70 52", None, stroke=shade(c, -0.25), width=1.8)


@kind("key", "house", (YELLOW, SILVER, "#b5763f"))
def key(p: Pen, c: str) -> None:
    p.poly("40 46 96 46 96 56 90 56 90 70 80 70 80 56 74 56 74 66 66 66 66 56 40 56", c)
    p.oval(24, 50, 22, 22, c)
    p.oval(20, 50, 9, 9, WHITE)


@kind("clock", "house", BRIGHT)
def clock(p: Pen, c: str) -> None:
    p.oval(50, 50, 46, 46, c)
    p.oval(50, 50, 37, 37, WHITE)
    for x, y in ((50, 18), (82, 50), (50, 82), (18, 50)):
        p.oval(x, y, 3, 3, BLACK, line=False)
    p.path("M50 50 L50 25", stroke=BLACK, width=4)
    p.path("M50 50 L67 59", stroke=BLACK, width=5)
    p.oval(50, 50, 4, 4, RED, line=False)


@kind("chair", "house", (BROWN, RED, BLUE, TAN))
def chair(p: Pen, c: str) -> None:
    for x in (20, 72):
        p.box(x, 60, 8, 38, shade(c, -0.2))
    p.box(20, 2, 8, 58, c, r=2)
    p.box(72, 2, 8, 58, c, r=2)
    for y in (8, 24, 40):
        p.box(28, y, 44, 9, c)
    p.poly("24 56 76 56 86 70 14 70", shade(c, 0.15))
    for x in (14, 78):
        p.box(x, 70, 8, 28, c)


@kind("table", "house", (BROWN, TAN, GREY))
def table(p: Pen, c: str) -> None:
    for x in (14, 78):
        p.box(x, 40, 8, 48, shade(c, -0.2))
    p.poly("14 22 86 22 98 40 2 40", c)
    p.box(2, 40, 96, 8, shade(c, -0.1))


@kind("book", "house", BRIGHT)
def book(p: Pen, c: str) -> None:
    p.path("M50 26 Q26 12 4 20 L4 84 Q28 76 50 90 Q72 76 96 84 L96 20 Q74 12 50 26", c)
    p.path("M50 28 Q28 15 9 21 L9 77 Q30 72 50 84", WHITE)
    p.path("M50 28 Q72 15 91 21 L91 77 Q70 72 50 84", WHITE)
    for y in (34, 46, 58):
        p.path(f"M17 {y} Q30 {y - 2} 43 {y + 6}", stroke=GREY, width=2)
        p.path(f"M83 {y} Q70 {y - 2} 57 {y + 6}", stroke=GREY, width=2)


@kind("pair of scissors", "house", (RED, BLUE, GREEN, ORANGE), plural="pairs of scissors")
def scissors(p: Pen, c: str) -> None:
    p.path("M62 72 Q34 30 30 2 Q46 18 72 66", SILVER)
    p.path("M38 72 Q66 30 70 2 Q54 18 28 66", SILVER)
    for x in (28, 72):
        p.path(
            f"M{x - 13} 78 C{x - 13} 58 {x + 13} 58 {x + 13} 78 C{x + 13} 98 {x - 13} 98 {x - 13} 78", stroke=c, width=8
        )
    p.oval(50, 47, 3, 3, DARK)


@kind("umbrella", "house", BRIGHT)
def umbrella(p: Pen, c: str) -> None:
    p.path("M50 8 L50 84 Q50 97 61 97 Q71 97 71 86", stroke=BROWN, width=5)
    p.path("M3 52 C6 -4 94 -4 97 52 Q88 42 73 52 Q62 42 50 52 Q38 42 27 52 Q12 42 3 52", c)
    p.path("M27 52 Q30 24 50 10 M50 10 Q70 24 73 52", None, stroke=shade(c, -0.35), width=2)


@kind("bottle", "house", (GREEN, "#6a3d2a", BLUE))
def bottle(p: Pen, c: str) -> None:
    p.path("M40 10 L40 30 Q24 40 24 54 L24 90 Q24 97 32 97 L68 97 Q76 97 76 90 L76 54 Q76 40 60 30 L60 10", c)
    p.box(37, 2, 26, 10, TAN, r=2)
    p.box(24, 56, 52, 26, WHITE)
    p.path("M32 66 L68 66 M32 74 L56 74", None, stroke=GREY, width=2)


@kind("candle", "house", (WHITE, RED, YELLOW, "#9db7d6"))
def candle(p: Pen, c: str) -> None:
    p.path("M50 34 L50 22", stroke=BLACK, width=3)
    p.path("M50 2 C62 14 60 28 50 28 C40 28 38 14 50 2", ORANGE)
    p.path("M50 12 C55 18 54 25 50 25 C46 25 45 18 50 12", YELLOW, line=False)
    p.box(36, 34, 28, 52, c, r=2)
    p.path("M36 40 Q40 54 44 42 Q48 62 52 40", stroke=shade(c, -0.15), width=3)
    p.path("M18 86 L82 86 Q78 97 66 97 L34 97 Q22 97 18 86", "#b8893b")


@kind("hammer", "house", (BROWN, RED, YELLOW))
def hammer(p: Pen, c: str) -> None:
    p.poly("44 30 56 30 58 97 42 97", c)
    p.path("M14 10 L62 10 Q84 10 94 28 Q80 24 70 32 L14 32", GREY)
    p.box(6, 7, 14, 28, DARK, r=3)


@kind("pencil", "house", (YELLOW, RED, BLUE, GREEN))
def pencil(p: Pen, c: str) -> None:
    p.poly("20 66 70 16 84 30 34 80", c)
    p.poly("20 66 34 80 6 94", TAN)
    p.poly("11 85 15 89 6 94", BLACK)
    p.poly("66 20 72 14 86 28 80 34", SILVER)
    p.path("M72 14 Q80 2 92 8 Q98 20 86 28", "#e58a8a")
    p.path("M25 71 L75 21 M29 75 L79 25", None, stroke=shade(c, -0.3), width=1.6)


@kind("envelope", "house", (WHITE, TAN, "#a9c4e4"))
def envelope(p: Pen, c: str) -> None:
    p.box(3, 20, 94, 62, c, r=3)
    p.path("M5 80 L40 48 M95 80 L60 48", None, stroke=shade(c, -0.35), width=2)
    p.poly("4 22 96 22 50 58", shade(c, -0.08))
    p.oval(50, 54, 8, 8, RED)


@kind("hat", "house", (BLACK, BROWN, "#6b4a8f", BLUE))
def hat(p: Pen, c: str) -> None:
    p.oval(50, 82, 48, 12, c)
    p.path("M24 80 L20 14 Q50 4 80 14 L76 80 Q50 90 24 80", c)
    p.path("M23.4 62 Q50 72 76.6 62 L76 78 Q50 88 24 78", RED)


@kind("bell", "house", (YELLOW, "#c98d4b", SILVER))
def bell(p: Pen, c: str) -> None:
    p.path("M42 12 C36 -2 64 -2 58 12", stroke=shade(c, -0.3), width=5)
    p.oval(50, 88, 9, 9, shade(c, -0.3))
    p.path("M50 8 C76 8 74 40 80 60 Q84 70 94 78 L94 84 L6 84 L6 78 Q16 70 20 60 C26 40 24 8 50 8", c)
    p.path("M12 76 L88 76", stroke=shade(c, -0.35), width=3)


@kind("backpack", "house", BRIGHT)
def backpack(p: Pen, c: str) -> None:
    p.path("M36 16 C36 -4 64 -4 64 16", stroke=DARK, width=5)
    p.box(6, 48, 16, 34, shade(c, -0.2), r=6)
    p.box(78, 48, 16, 34, shade(c, -0.2), r=6)
    p.path("M14 92 L14 44 Q14 12 50 12 Q86 12 86 44 L86 92 Q86 97 80 97 L20 97 Q14 97 14 92", c)
    p.box(26, 56, 48, 34, shade(c, 0.15), r=6)
    p.path("M30 66 L70 66", stroke=DARK, width=2.5)
    p.path("M22 42 Q50 34 78 42", stroke=DARK, width=2.5)
    p.box(46, 64, 8, 12, YELLOW, r=2)


@kind("drum", "house", (RED, BLUE, GREEN, ORANGE))
def drum(p: Pen, c: str) -> None:
    p.path("M6 36 L6 78 Q50 100 94 78 L94 36", c)
    p.path("M6 40 L24 84 L38 48 L50 90 L62 48 L76 84 L94 40", stroke=WHITE, width=2.5)
    p.oval(50, 36, 44, 15, "#f0e6d2")
    p.path("M30 34 L6 6", stroke=BROWN, width=4)
    p.path("M70 34 L94 6", stroke=BROWN, width=4)
    p.oval(31, 35, 4, 4, BROWN)
    p.oval(69, 35, 4, 4, BROWN)


@kind("guitar", "house", (ORANGE, RED, BROWN, BLUE))
def guitar(p: Pen, c: str) -> None:
    p.path("M50 44 C62 42 70 50 66 60 C84 66 78 97 50 97 C22 97 16 66 34 60 C30 50 38 42 50 44", c)
    p.box(46, 14, 8, 52, "#5b3a21")
    p.poly("43 1 57 1 55 15 45 15", "#3a2617")
    p.oval(50, 68, 9, 9, BLACK)
    p.box(40, 84, 20, 5, "#3a2617")
    p.path("M48 14 L48 86 M52 14 L52 86", None, stroke=SILVER, width=0.9)


@kind("ball", "house", BRIGHT)
def ball(p: Pen, c: str) -> None:
    p.oval(50, 50, 47, 47, WHITE)
    p.path("M50 3 C14 14 14 86 50 97 C2 92 2 8 50 3", c)
    p.path("M50 3 C40 30 40 70 50 97 C60 70 60 30 50 3", c)
    p.path("M50 3 C86 14 86 86 50 97 C98 92 98 8 50 3", c)
    p.oval(50, 8, 6, 4, WHITE)


@kind("teddy bear", "house", (BROWN, TAN, "#b5763f"))
def teddy_bear(p: Pen, c: str) -> None:
    for x in (26, 74):
        p.oval(x, 12, 11, 11, c)
        p.oval(x, 12, 5, 5, shade(c, 0.4), line=False)
        p.oval(50 + (x - 50) * 1.4, 62, 10, 16, c)
        p.oval(50 + (x - 50) * 0.9, 90, 13, 9, c)
    p.oval(50, 72, 27, 25, c)
    p.oval(50, 74, 16, 16, shade(c, 0.4), line=False)
    p.oval(50, 30, 28, 25, c)
    p.oval(50, 38, 12, 10, shade(c, 0.5))
    p.oval(50, 34, 5, 4, BLACK)
    p.oval(39, 25, 3.4, 4, BLACK)
    p.oval(61, 25, 3.4, 4, BLACK)
