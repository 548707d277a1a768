"""Animals."""

from paceline.evals.vision.drawing import Pen, shade
from paceline.evals.vision.objects.kinds import (
    BLACK,
    BLUE,
    BROWN,
    GREEN,
    GREY,
    ORANGE,
    PINK,
    PURPLE,
    RED,
    TAN,
    WHITE,
    YELLOW,
    kind,
)  # fmt: skip


def eye(p: Pen, x: float, y: float, r: float = 4) -> None:
    p.oval(x, y, r, r, WHITE)
    p.oval(x, y, r * 0.5, r * 0.5, BLACK, line=False)


@kind("fish", "animal", (ORANGE, BLUE, RED, YELLOW), plural="fish")
def fish(p: Pen, c: str) -> None:
    p.path("M66 50 L97 22 Q90 50 97 78 L66 50", shade(c, -0.2))
    p.path("M34 30 Q50 8 66 34", shade(c, -0.2))
    p.path("M3 52 C18 16 60 16 78 50 C60 86 18 86 3 52", c)
    p.path("M34 28 Q44 50 34 75", stroke=shade(c, -0.4), width=2.5)
    p.path("M46 50 Q60 44 60 60 Q50 64 46 50", shade(c, -0.2))
    eye(p, 21, 44, 5)


@kind("bird", "animal", (BLUE, RED, "#6f8f3a"))
def bird(p: Pen, c: str) -> None:
    for x in (44, 54):
        p.path(f"M{x} 80 L{x - 2} 97 M{x - 2} 97 L{x - 9} 97", stroke=ORANGE, width=3)
    p.poly("66 52 98 36 92 52 98 60 68 68", shade(c, -0.25))
    p.path("M12 32 C14 8 46 6 48 30 C66 34 80 50 76 66 C68 86 34 88 24 68 C18 58 20 46 12 32", c)
    p.path("M40 48 Q66 44 76 62 Q56 76 40 48", shade(c, -0.25))
    p.poly("14 26 1 32 14 37", ORANGE)
    eye(p, 26, 26, 4.5)


@kind("cat", "animal", (GREY, ORANGE, "#5a5f66", TAN))
def cat(p: Pen, c: str) -> None:
    p.path("M70 82 C98 90 98 60 88 50", stroke=shade(c, -0.15), width=8)
    p.path("M28 96 C22 66 38 50 50 50 C62 50 80 66 74 96 L28 96", c)
    p.path("M20 34 L18 4 L38 16 Q50 12 62 16 L82 4 L80 34 Q80 60 50 62 Q20 60 20 34", c)
    for x in (38, 62):
        p.oval(x, 34, 5, 6, "#c7e07a")
        p.oval(x, 34, 1.6, 5, BLACK, line=False)
    p.poly("46 44 54 44 50 49", PINK)
    p.path("M50 49 Q45 56 40 52 M50 49 Q55 56 60 52", stroke=BLACK, width=1.8)
    for whisker in ("M34 46 L12 42", "M34 50 L12 54", "M66 46 L88 42", "M66 50 L88 54"):
        p.path(whisker, stroke=BLACK, width=1.4)
    p.path("M42 96 L42 78", stroke=shade(c, -0.45), width=2)
    p.path("M58 96 L58 78", stroke=shade(c, -0.45), width=2)


@kind("butterfly", "animal", (ORANGE, BLUE, PURPLE, YELLOW), plural="butterflies")
def butterfly(p: Pen, c: str) -> None:
    p.path("M49 48 C34 2 -2 8 5 34 C8 52 30 54 49 50", c)
    p.path("M51 48 C66 2 102 8 95 34 C92 52 70 54 51 50", c)
    p.path("M49 52 C26 50 8 64 18 82 C30 98 46 78 49 56", shade(c, -0.2))
    p.path("M51 52 C74 50 92 64 82 82 C70 98 54 78 51 56", shade(c, -0.2))
    for x, y, r in ((22, 30, 7), (78, 30, 7), (29, 72, 5), (71, 72, 5)):
        p.oval(x, y, r, r, WHITE, line=False)
    p.path("M48 28 Q44 12 36 8", stroke=BLACK, width=2)
    p.path("M52 28 Q56 12 64 8", stroke=BLACK, width=2)
    p.oval(50, 52, 4, 26, BLACK)


@kind("snail", "animal", (BROWN, "#b5763f", PINK, GREEN))
def snail(p: Pen, c: str) -> None:
    p.path("M16 38 L8 14", stroke="#a99a72", width=4)
    p.path("M22 36 L26 12", stroke="#a99a72", width=4)
    p.path("M8 46 Q14 32 28 40 Q32 62 44 72 L92 76 Q98 86 96 90 L30 90 C10 88 12 60 8 46", "#d8caa0")
    p.oval(8, 13, 4, 4, BLACK)
    p.oval(26, 11, 4, 4, BLACK)
    p.oval(62, 50, 31, 31, c)
    p.path("M62 52 C54 44 68 36 74 46 C80 60 62 70 50 62 C38 50 48 28 66 28 C84 30 88 50 82 62",
           stroke=shade(c, -0.45), width=4)  # fmt: skip


@kind("turtle", "animal", (GREEN, "#6f8f3a", TAN))
def turtle(p: Pen, c: str) -> None:
    skin = "#a7bf6a"
    p.path("M74 62 C78 34 100 36 98 52 Q98 62 84 66", skin)
    p.poly("14 70 1 80 16 78", skin)
    for x in (20, 62):
        p.box(x, 68, 15, 22, skin, r=6)
    p.path("M8 72 C10 14 82 14 84 72 Q46 80 8 72", c)
    p.poly("36 40 56 40 64 56 46 66 28 56", shade(c, -0.25))
    for mark in ("M36 40 L30 28", "M56 40 L62 28", "M64 56 L80 58", "M28 56 L12 58", "M46 66 L46 75"):
        p.path(mark, stroke=shade(c, -0.5), width=2)
    eye(p, 88, 48, 3.5)


@kind("rabbit", "animal", (WHITE, GREY, TAN))
def rabbit(p: Pen, c: str) -> None:
    p.path("M34 40 C18 4 32 -6 40 8 Q46 22 45 38", c)
    p.path("M66 40 C82 4 68 -6 60 8 Q54 22 55 38", c)
    p.path("M36 34 C28 12 34 6 38 14 Q41 24 41 34", PINK, line=False)
    p.path("M64 34 C72 12 66 6 62 14 Q59 24 59 34", PINK, line=False)
    p.path("M24 97 C18 70 32 64 50 64 C68 64 82 70 76 97 L24 97", c)
    p.oval(50, 53, 27, 23, c)
    p.oval(39, 48, 4, 5, BLACK)
    p.oval(61, 48, 4, 5, BLACK)
    p.oval(50, 58, 4, 3, PINK)
    p.box(46, 64, 8, 8, WHITE, r=1)
    p.oval(50, 88, 12, 10, shade(c, 0.5), line=False)


@kind("ladybug", "animal", (RED, ORANGE, YELLOW))
def ladybug(p: Pen, c: str) -> None:
    for x, y, end in ((20, 44, 4), (14, 60, 0), (20, 76, 6)):
        p.path(f"M{x} {y} L{end} {y + 2}", stroke=BLACK, width=4)
        p.path(f"M{100 - x} {y} L{100 - end} {y + 2}", stroke=BLACK, width=4)
    p.path("M42 14 Q38 4 30 2", stroke=BLACK, width=3)
    p.path("M58 14 Q62 4 70 2", stroke=BLACK, width=3)
    p.oval(50, 26, 22, 17, BLACK)
    p.oval(50, 60, 38, 37, c)
    p.path("M50 24 L50 97", stroke=BLACK, width=3.5)
    for x, y in ((32, 46), (68, 46), (26, 68), (74, 68), (38, 84), (62, 84)):
        p.oval(x, y, 7, 7, BLACK, line=False)


@kind("duck", "animal", (YELLOW, WHITE))
def duck(p: Pen, c: str) -> None:
    p.path("M34 42 C18 30 24 4 44 6 C62 6 64 24 56 40 C74 46 84 46 97 34 C98 74 84 92 54 92 C22 92 12 66 34 42", c)
    p.path("M46 58 Q66 50 82 60 Q72 82 54 76 Q44 70 46 58", shade(c, -0.18))
    p.path("M28 22 Q14 18 4 28 Q14 34 28 32", ORANGE)
    eye(p, 39, 20, 4.5)


@kind("sheep", "animal", (WHITE, "#e8dfca", "#5b5b60"), plural="sheep")
def sheep(p: Pen, c: str) -> None:
    for x in (30, 42, 62, 74):
        p.box(x, 68, 7, 28, BLACK)
    p.path("M30 34 C34 18 50 18 54 26 C62 16 78 20 78 32 C94 30 98 48 90 56 C96 72 80 80 72 74"
           " C66 86 50 84 48 76 C38 84 24 78 28 66 C18 60 20 40 30 34", c)  # fmt: skip
    p.path("M10 36 C10 22 36 24 36 40 C36 58 28 66 22 66 C12 66 8 52 10 36", "#4b4640")
    p.path("M34 34 Q46 32 44 40 Q38 44 34 40", "#4b4640")
    p.oval(24, 24, 10, 7, c)
    eye(p, 19, 42, 3.5)


@kind("penguin", "animal", ("#2f3a4a", "#3b3b44"))
def penguin(p: Pen, c: str) -> None:
    for x in (36, 64):
        p.oval(x, 93, 13, 5, ORANGE)
    p.path("M24 44 Q6 60 10 78 Q22 72 28 56", c)
    p.path("M76 44 Q94 60 90 78 Q78 72 72 56", c)
    p.path("M50 3 C76 3 74 30 78 48 C86 80 70 93 50 93 C30 93 14 80 22 48 C26 30 24 3 50 3", c)
    p.path("M50 32 C70 20 70 44 70 60 C72 82 62 88 50 88 C38 88 28 82 30 60 C30 44 30 20 50 32", WHITE)
    eye(p, 41, 22, 4.5)
    eye(p, 59, 22, 4.5)
    p.poly("43 30 57 30 50 40", ORANGE)


@kind("elephant", "animal", (GREY, "#7f8ea3"))
def elephant(p: Pen, c: str) -> None:
    p.path("M92 40 Q99 48 96 60", stroke=shade(c, -0.3), width=3)
    for x in (40, 76):
        p.box(x, 60, 15, 34, shade(c, -0.1), r=3)
    p.path("M36 34 C50 18 86 18 92 44 C96 62 90 74 84 74 L46 74 C36 70 34 50 36 34", c)
    p.path("M50 32 C44 10 12 12 12 38 C12 60 10 76 4 82 Q6 92 14 88 C24 80 22 64 26 58 Q46 62 50 32", c)
    p.path("M38 24 C54 14 64 28 60 48 C56 60 42 58 38 46 Q34 34 38 24", shade(c, -0.15))
    p.path("M24 58 Q28 70 38 70 Q30 62 30 56", WHITE)
    p.oval(26, 35, 3, 3.4, BLACK, line=False)


@kind("crab", "animal", (RED, ORANGE))
def crab(p: Pen, c: str) -> None:
    for y, end in ((60, 66), (68, 78), (76, 90)):
        p.path(f"M28 {y} Q14 {y - 6} 6 {end}", stroke=shade(c, -0.25), width=4)
        p.path(f"M72 {y} Q86 {y - 6} 94 {end}", stroke=shade(c, -0.25), width=4)
    p.path("M30 54 Q14 50 16 36", stroke=c, width=6)
    p.path("M70 54 Q86 50 84 36", stroke=c, width=6)
    p.path("M4 16 Q10 22 15 22 Q18 12 24 10 C32 26 24 38 16 38 C6 38 0 28 4 16", c)
    p.path("M96 16 Q90 22 85 22 Q82 12 76 10 C68 26 76 38 84 38 C94 38 100 28 96 16", c)
    for x in (42, 58):
        p.path(f"M{x} 50 L{x} 34", stroke=c, width=4)
        eye(p, x, 33, 5)
    p.path("M20 64 C22 42 78 42 80 64 C78 86 22 86 20 64", c)
    p.path("M40 72 Q50 79 60 72", stroke=shade(c, -0.5), width=2.5)
