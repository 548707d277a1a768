"""Plants, the sky, and what people draw of them."""

from paceline.evals.vision.drawing import Pen, shade
from paceline.evals.vision.objects.kinds import (
    BLACK,
    BLUE,
    BROWN,
    GREEN,
    ORANGE,
    PINK,
    PURPLE,
    RED,
    TAN,
    TEAL,
    WHITE,
    YELLOW,
    kind,
)  # fmt: skip


@kind("tree", "nature", (GREEN, "#6f8f3a", "#d98a2b"))
def tree(p: Pen, c: str) -> None:
    p.path("M43 60 L40 97 L60 97 L57 60", BROWN)
    p.path("M26 66 C2 66 0 40 20 36 C16 10 44 -4 54 12 C78 0 92 22 82 38 C102 44 96 68 74 66 C64 78 36 78 26 66", c)
    p.path("M30 50 Q38 56 44 48 M56 32 Q64 38 70 30", None, stroke=shade(c, -0.35), width=2.2)


@kind("flower", "nature", (RED, PINK, PURPLE, YELLOW, BLUE))
def flower(p: Pen, c: str) -> None:
    p.path("M50 50 Q47 76 50 98", stroke=GREEN, width=5)
    p.path("M50 84 Q66 60 84 70 Q74 90 50 86", GREEN)
    for x, y in ((50, 14), (70, 24), (68, 46), (32, 46), (30, 24), (50, 52)):
        p.oval(x, y, 13, 13, c)
    p.oval(50, 33, 13, 13, "#e8a62f" if c != YELLOW else BROWN)


@kind("star", "nature", (YELLOW, ORANGE, RED, BLUE))
def star(p: Pen, c: str) -> None:
    p.star(50, 52, 49, 20, 5, c)


@kind("moon", "nature", (YELLOW, "#c9ccd2"))
def moon(p: Pen, c: str) -> None:
    p.path("M62 4 C8 6 4 92 62 97 C76 97 84 92 88 86 C44 86 40 22 84 14 Q76 5 62 4", c)
    p.oval(28, 42, 4, 4, shade(c, -0.2), line=False)
    p.oval(38, 70, 5, 5, shade(c, -0.2), line=False)


@kind("cloud", "nature", (WHITE, "#9aa5b1", "#a9c4e4"))
def cloud(p: Pen, c: str) -> None:
    p.path("M20 78 C-2 78 -2 48 20 48 C18 24 46 16 54 34 C66 22 84 32 80 48 C102 48 102 78 80 78 L20 78", c)


@kind("sun", "nature", (YELLOW, ORANGE))
def sun(p: Pen, c: str) -> None:
    p.star(50, 50, 49, 32, 12, shade(c, -0.1))
    p.oval(50, 50, 27, 27, c)


@kind("leaf", "nature", (GREEN, "#c77b30", RED), plural="leaves")
def leaf(p: Pen, c: str) -> None:
    p.path("M22 78 L4 96", stroke=BROWN, width=5)
    p.path("M20 80 C4 34 46 6 94 6 C96 56 66 96 20 80", c)
    p.path("M22 78 Q52 48 82 18", stroke=shade(c, -0.4), width=3)
    for vein in ("M38 62 L36 40", "M52 48 L52 26", "M42 58 L64 62", "M56 44 L78 46"):
        p.path(vein, stroke=shade(c, -0.4), width=2)


@kind("cactus", "nature", (GREEN, TEAL), plural="cacti")
def cactus(p: Pen, c: str) -> None:
    p.path("M44 56 L24 56 Q16 56 16 46 L16 30", stroke=shade(c, -0.1), width=12)
    p.path("M56 46 L76 46 Q84 46 84 36 L84 22", stroke=shade(c, -0.1), width=12)
    p.box(38, 4, 24, 80, c, r=12)
    for x in (44, 50, 56):
        p.path(f"M{x} 14 L{x} 74", stroke=shade(c, -0.35), width=1.4)
    p.poly("26 76 74 76 68 98 32 98", "#b9653a")
    p.box(22, 72, 56, 9, "#b9653a")


@kind("heart", "nature", (RED, PINK, PURPLE))
def heart(p: Pen, c: str) -> None:
    p.path("M50 26 C38 -2 2 6 4 36 C6 62 36 78 50 96 C64 78 94 62 96 36 C98 6 62 -2 50 26", c)
    p.path("M18 36 Q18 22 30 20", stroke=shade(c, 0.6), width=5)


@kind("snowman", "nature", (RED, BLUE, GREEN), plural="snowmen")
def snowman(p: Pen, c: str) -> None:
    p.path("M24 54 L4 40 M10 44 L4 50", None, stroke=BROWN, width=3)
    p.path("M76 54 L96 40", stroke=BROWN, width=3)
    p.oval(50, 78, 27, 20, WHITE)
    p.oval(50, 54, 20, 16, WHITE)
    p.oval(50, 30, 16, 14, WHITE)
    p.box(34, 14, 32, 5, BLACK)
    p.box(40, 0, 20, 16, BLACK)
    p.path("M36 40 Q50 48 64 40 L65 45 Q50 53 35 45", c)
    p.poly("50 31 66 35 50 36", ORANGE)
    for x, y in ((44, 27), (56, 27), (50, 58), (50, 70), (50, 82)):
        p.oval(x, y, 2.2, 2.2, BLACK, line=False)


@kind("mountain", "nature", ("#7d8794", "#8a7460", "#6f8a72"))
def mountain(p: Pen, c: str) -> None:
    p.poly("36 90 70 28 98 90", shade(c, -0.15))
    p.poly("2 90 40 12 76 90", c)
    p.poly("40 12 28 37 35 42 40 36 46 44 52 38", WHITE)
    p.poly("70 28 62 43 68 46 72 41 77 44", WHITE)


@kind("tent", "nature", (ORANGE, GREEN, BLUE, RED))
def tent(p: Pen, c: str) -> None:
    p.path("M44 6 L50 16 L56 6", stroke=BROWN, width=3)
    p.poly("50 12 98 90 2 90", c)
    p.poly("50 34 68 90 32 90", "#3a3f45")
    p.poly("50 34 60 62 42 90 32 90", shade(c, 0.3))


@kind("shell", "nature", (PINK, TAN, "#f0d9b8"))
def shell(p: Pen, c: str) -> None:
    p.path("M36 82 L64 82 L68 96 L32 96", c)
    p.path("M40 86 C-6 66 -4 20 22 16 Q30 4 44 10 Q50 2 56 10 Q70 4 78 16 C104 20 106 66 60 86 L40 86", c)
    for x, y in ((8, 44), (26, 20), (50, 12), (74, 20), (92, 44)):
        p.path(f"M50 84 Q{(50 + x) / 2 + (x - 50) * 0.12} {(84 + y) / 2} {x} {y}", stroke=shade(c, -0.3), width=2.2)


@kind("crown", "nature", (YELLOW, "#c9ccd2"))
def crown(p: Pen, c: str) -> None:
    p.poly("8 84 2 24 28 50 50 10 72 50 98 24 92 84", c)
    p.box(8, 74, 84, 14, shade(c, -0.15))
    for x, colour in ((28, RED), (50, BLUE), (72, RED)):
        p.oval(x, 81, 4.5, 4.5, colour)
    for x, y in ((3, 24), (50, 11), (97, 24)):
        p.oval(x, y, 5, 5, RED)
