"""What moves, and what stands along the road."""

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

GLASS = "#bfe0f2"


def wheel(p: Pen, x: float, y: float, r: float) -> None:
    p.oval(x, y, r, r, BLACK)
    p.oval(x, y, r * 0.5, r * 0.5, SILVER)


@kind("car", "traffic", BRIGHT)
def car(p: Pen, c: str) -> None:
    p.path("M22 46 Q30 22 40 20 L66 20 Q76 22 84 46", c)
    p.path("M29 45 Q35 28 42 27 L52 27 L52 45", GLASS)
    p.path("M57 45 L57 27 L65 27 Q71 30 77 45", GLASS)
    p.path("M3 68 Q2 50 14 47 Q50 42 88 46 Q98 50 97 68 Q97 74 92 74 L8 74 Q3 74 3 68", c)
    p.oval(94, 56, 3, 4, YELLOW)
    p.path("M55 50 L55 70", stroke=shade(c, -0.4), width=1.8)
    wheel(p, 25, 74, 11)
    wheel(p, 75, 74, 11)


@kind("bus", "traffic", (YELLOW, RED, BLUE, GREEN), plural="buses")
def bus(p: Pen, c: str) -> None:
    p.box(2, 18, 96, 58, c, r=8)
    for x in (9, 26, 43, 60):
        p.box(x, 26, 13, 18, GLASS, r=2)
    p.box(79, 26, 13, 46, GLASS, r=2)
    p.path("M4 54 L76 54", stroke=shade(c, -0.4), width=3)
    wheel(p, 24, 77, 10)
    wheel(p, 66, 77, 10)


@kind("truck", "traffic", (RED, BLUE, GREEN, ORANGE))
def truck(p: Pen, c: str) -> None:
    p.box(2, 18, 60, 54, "#e4e0d6", r=2)
    for x in (17, 32, 47):
        p.path(f"M{x} 20 L{x} 70", stroke=GREY, width=1.6)
    p.path("M64 34 L82 34 Q90 36 96 54 L97 72 L64 72", c)
    p.path("M70 40 L81 40 Q87 43 90 54 L70 54", GLASS)
    p.box(2, 70, 95, 6, DARK)
    wheel(p, 20, 78, 10)
    wheel(p, 80, 78, 10)


@kind("boat", "traffic", (RED, BLUE, BROWN, GREEN))
def boat(p: Pen, c: str) -> None:
    p.path("M48 4 L48 72", stroke=BROWN, width=4)
    p.path("M52 8 Q84 34 86 62 L52 62", WHITE)
    p.poly("44 18 44 62 12 62", "#e9ddc0")
    p.path("M3 70 L97 70 Q88 94 74 94 L24 94 Q10 94 3 70", c)
    p.path("M7 78 L93 78", stroke=WHITE, width=3)


@kind("bicycle", "traffic", (RED, BLUE, GREEN, BLACK))
def bicycle(p: Pen, c: str) -> None:
    for x in (22, 78):
        p.path(
            f"M{x - 19} 64 C{x - 19} 39 {x + 19} 39 {x + 19} 64 C{x + 19} 89 {x - 19} 89 {x - 19} 64",
            stroke=BLACK,
            width=4,
        )
        for spoke in (f"M{x - 18} 64 L{x + 18} 64", f"M{x} 46 L{x} 82"):
            p.path(spoke, stroke=GREY, width=1)
    p.path("M22 64 L38 34 L68 34 L48 64 L22 64 M48 64 L36 28", None, stroke=c, width=4.5)
    p.path("M78 64 L66 26 L76 20", stroke=c, width=4.5)
    p.path("M28 27 L44 27", stroke=BLACK, width=6)
    p.oval(48, 64, 5, 5, DARK)


@kind("airplane", "traffic", (WHITE, SILVER, "#a9c4e4"))
def airplane(p: Pen, c: str) -> None:
    p.poly("8 22 20 22 32 46 12 46", RED)
    p.poly("46 44 60 14 70 14 66 46", shade(c, -0.2))
    p.path("M6 48 Q10 40 30 40 L82 40 Q97 44 98 52 Q94 62 80 62 L26 62 Q8 60 6 48", c)
    for x in (36, 46, 56, 66):
        p.oval(x, 48, 3, 3, BLUE, line=False)
    p.path("M82 43 Q92 46 93 50 L82 50", GLASS)
    p.poly("42 56 66 56 40 90 30 90", shade(c, -0.15))


@kind("rocket", "traffic", (RED, BLUE, ORANGE))
def rocket(p: Pen, c: str) -> None:
    p.path("M40 78 Q42 92 50 99 Q58 92 60 78", ORANGE)
    p.path("M45 78 Q47 86 50 91 Q53 86 55 78", YELLOW, line=False)
    p.poly("32 50 14 74 14 88 34 76", c)
    p.poly("68 50 86 74 86 88 66 76", c)
    p.path("M50 1 C68 16 72 42 68 80 L32 80 C28 42 32 16 50 1", WHITE)
    p.path("M50 1 Q61 11 65.4 26 L34.6 26 Q39 11 50 1", c)
    p.oval(50, 42, 10, 10, GLASS)


@kind("balloon", "traffic", BRIGHT)
def balloon(p: Pen, c: str) -> None:
    p.path("M50 72 Q40 82 50 88 Q58 92 52 98", stroke=DARK, width=1.8)
    p.poly("45 74 55 74 50 66", shade(c, -0.2))
    p.path("M50 70 C14 54 12 2 50 2 C88 2 86 54 50 70", c)
    p.path("M32 30 Q32 16 42 12", stroke=shade(c, 0.65), width=5)


@kind("kite", "traffic", BRIGHT)
def kite(p: Pen, c: str) -> None:
    p.path("M50 66 Q38 76 48 84 Q58 90 46 98", stroke=DARK, width=2)
    p.poly("41 80 52 76 50 84", RED)
    p.poly("42 92 55 88 51 97", BLUE)
    p.poly("50 2 86 30 50 68 14 30", c)
    p.poly("50 2 86 30 50 30", shade(c, 0.4))
    p.poly("14 30 50 30 50 68", shade(c, 0.4))
    p.path("M50 2 L50 68 M14 30 L86 30", None, stroke=BROWN, width=2)


@kind("house", "traffic", (TAN, RED, YELLOW, "#a9c4e4"))
def house(p: Pen, c: str) -> None:
    p.box(68, 8, 12, 26, "#a2553c")
    p.box(12, 42, 76, 54, c)
    p.poly("50 4 98 46 2 46", "#a8452f" if c != RED else DARK)
    p.box(42, 62, 18, 34, BROWN)
    p.oval(56, 80, 1.6, 1.6, YELLOW, line=False)
    for x in (19, 66):
        p.box(x, 54, 16, 16, GLASS)
        p.path(f"M{x + 8} 54 L{x + 8} 70 M{x} 62 L{x + 16} 62", None, stroke=DARK, width=1.6)


@kind("traffic light", "traffic", (DARK, "#3d5a3f"))
def traffic_light(p: Pen, c: str) -> None:
    p.box(46, 70, 8, 28, GREY)
    p.box(30, 2, 40, 72, c, r=8)
    for y, colour in ((16, RED), (38, YELLOW), (60, GREEN)):
        p.oval(50, y, 9, 9, colour)


@kind("train", "traffic", (RED, BLUE, GREEN, BLACK))
def train(p: Pen, c: str) -> None:
    p.box(74, 14, 10, 26, DARK)
    p.poly("70 6 88 6 84 16 74 16", DARK)
    p.box(36, 36, 56, 34, c, r=8)
    p.box(6, 16, 34, 54, c, r=2)
    p.box(2, 10, 42, 8, DARK, r=2)
    p.box(13, 25, 20, 18, GLASS)
    p.box(2, 68, 92, 8, DARK)
    p.poly("90 66 99 88 88 88", GREY)
    wheel(p, 20, 82, 12)
    wheel(p, 52, 85, 9)
    wheel(p, 76, 85, 9)


@kind("anchor", "traffic", (DARK, BLUE, BROWN))
def anchor(p: Pen, c: str) -> None:
    p.path("M50 22 L50 92", stroke=c, width=8)
    p.path("M28 36 L72 36", stroke=c, width=7)
    p.path("M10 60 Q14 92 50 92 Q86 92 90 60", stroke=c, width=8)
    p.poly("2 68 10 50 20 66", c)
    p.poly("98 68 90 50 80 66", c)
    p.path("M40 12 C40 -2 60 -2 60 12 C60 26 40 26 40 12", stroke=c, width=5)


@kind("flag", "traffic", BRIGHT)
def flag(p: Pen, c: str) -> None:
    p.path("M18 8 L18 98", stroke=BROWN, width=6)
    p.path("M20 10 Q38 0 56 10 Q76 20 94 8 L94 52 Q76 64 56 54 Q38 44 20 54", c)
    p.path("M20 25 Q38 15 56 25 Q76 35 94 23 L94 37 Q76 49 56 39 Q38 29 20 39", WHITE, line=False)
    p.oval(18, 7, 5, 5, YELLOW)
