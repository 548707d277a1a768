"""Food."""

from paceline.evals.vision.drawing import Pen, shade
from paceline.evals.vision.objects.kinds import (
    BROWN,
    GREEN,
    ORANGE,
    PINK,
    RED,
    TAN,
    WHITE,
    YELLOW,
    kind,
)  # fmt: skip


@kind("apple", "food", (RED, GREEN, "#c9b93a"))
def apple(p: Pen, c: str) -> None:
    p.path("M50 28 Q52 14 60 6", stroke=BROWN, width=5)
    p.path("M54 20 Q66 4 84 12 Q74 28 54 20", GREEN)
    p.path("M50 30 C30 16 8 30 10 56 C12 80 30 98 42 95 Q50 92 58 95 C70 98 88 80 90 56 C92 30 70 16 50 30", c)
    p.path("M22 52 Q22 40 32 36", stroke=shade(c, 0.6), width=5)


@kind("banana", "food", (YELLOW, "#d9cf4a"))
def banana(p: Pen, c: str) -> None:
    p.path("M14 24 C16 66 52 92 92 74 Q98 70 94 66 C66 66 42 48 30 16 L22 8 Q12 8 16 18 Q13 20 14 24", c)
    p.path("M22 22 C28 54 56 76 92 70", stroke=shade(c, -0.3), width=2.5)
    p.path("M16 18 L22 8 Q28 8 28 13 L24 20 Q18 22 16 18", BROWN)
    p.oval(93, 70, 3, 4, BROWN)


@kind("pear", "food", ("#b9c94a", "#d9c24a"))
def pear(p: Pen, c: str) -> None:
    p.path("M51 18 Q50 8 58 2", stroke=BROWN, width=5)
    p.path("M50 16 C36 16 38 34 33 45 C26 56 16 62 17 76 C19 92 34 97 50 97 C66 97 81 92 83 76"
           " C84 62 74 56 67 45 C62 34 64 16 50 16", c)  # fmt: skip
    p.path("M28 74 Q29 64 37 58", stroke=shade(c, 0.6), width=5)


@kind("cherry", "food", (RED, "#9c2242"), plural="cherries")
def cherry(p: Pen, c: str) -> None:
    p.path("M30 66 Q38 30 62 8", stroke=GREEN, width=3.5)
    p.path("M72 70 Q70 34 62 8", stroke=GREEN, width=3.5)
    p.path("M62 10 Q78 -4 94 14 Q78 24 62 10", GREEN)
    for x, y in ((29, 77), (72, 79)):
        p.oval(x, y, 20, 19, c)
        p.oval(x - 7, y - 6, 4, 4, shade(c, 0.7), line=False)


@kind("carrot", "food", (ORANGE,))
def carrot(p: Pen, c: str) -> None:
    for leaf in (
        "M62 36 Q56 14 66 6 Q74 18 64 36",
        "M64 36 Q72 12 88 12 Q86 28 66 38",
        "M66 38 Q82 28 96 38 Q84 46 66 40",
    ):
        p.path(leaf, GREEN)
    p.path("M54 32 Q70 32 70 48 Q52 76 10 95 Q24 56 54 32", c)
    for mark in ("M44 46 L54 54", "M52 66 L44 60", "M30 62 L38 69", "M32 80 L27 75"):
        p.path(mark, stroke=shade(c, -0.3), width=2.5)


@kind("pizza", "food", (YELLOW,))
def pizza(p: Pen, c: str) -> None:
    p.path("M8 22 Q50 -4 92 22 L88 34 Q50 14 12 34 Q4 30 8 22", "#c98d4b")
    p.path("M13 32 Q50 14 87 32 L52 97 Q50 99 48 97 Q30 66 13 32", c)
    for x, y, r in ((36, 40, 9), (63, 38, 9), (51, 62, 9), (50, 82, 4)):
        p.oval(x, y, r, r, RED)
    for x, y in ((50, 30), (40, 55), (64, 54)):
        p.oval(x, y, 3, 3, GREEN, line=False)


@kind("ice cream", "food", (PINK, "#f3e3b4", "#8fd0bd"), plural="ice creams")
def ice_cream(p: Pen, c: str) -> None:
    p.poly("24 46 76 46 52 98 48 98", "#d9a259")
    for mark in ("M32 48 L55 90", "M45 48 L60 78", "M58 48 L65 64", "M68 48 L45 90", "M55 48 L40 78", "M42 48 L35 64"):
        p.path(mark, stroke="#a8722f", width=1.5)
    p.path("M18 46 C14 -8 86 -8 82 46 Q78 54 72 47 Q66 55 60 47 Q54 56 48 48 Q42 55 36 47 Q30 55 26 48 Q20 52 18 46", c)
    p.oval(50, 8, 7, 7, RED)


@kind("mushroom", "food", (RED, "#b5763f"))
def mushroom(p: Pen, c: str) -> None:
    p.path("M38 50 L35 90 Q50 98 65 90 L62 50", "#efe5d0")
    p.path("M6 54 C6 -8 94 -8 94 54 Q50 66 6 54", c)
    for x, y, r in ((32, 28, 8), (60, 20, 6), (72, 42, 7), (46, 45, 6), (20, 45, 4)):
        p.oval(x, y, r, r * 0.85, WHITE, line=False)


@kind("watermelon", "food", (RED,))
def watermelon(p: Pen, c: str) -> None:
    p.path("M2 32 C6 92 94 92 98 32 L2 32", GREEN)
    p.path("M8 32 C12 84 88 84 92 32 L8 32", "#e8f0cf", line=False)
    p.path("M12 32 C16 78 84 78 88 32 L12 32", c, line=False)
    for x, y in ((28, 44), (42, 42), (57, 42), (72, 44), (36, 57), (50, 59), (64, 57)):
        p.oval(x, y, 2, 3.4, "#2b1a14", line=False)


@kind("lemon", "food", (YELLOW,))
def lemon(p: Pen, c: str) -> None:
    p.path("M4 52 Q8 44 14 44 C26 12 74 12 86 44 Q92 44 96 52 Q92 60 86 60 C74 90 26 90 14 60 Q8 60 4 52", c)
    p.path("M26 40 Q34 28 46 27", stroke=shade(c, 0.75), width=5)
    p.path("M60 24 Q66 6 88 12 Q82 28 60 24", GREEN)


@kind("donut", "food", (PINK, "#7a4a2c", "#f0e2c4"))
def donut(p: Pen, c: str) -> None:
    p.oval(50, 52, 46, 42, TAN)
    p.path("M8 50 C10 -6 90 -6 92 50 Q88 62 78 58 Q68 70 58 64 Q48 74 38 64 Q28 70 20 60 Q10 62 8 50", c)
    p.oval(50, 45, 14, 11, "#e9e4da")
    for i, (x, y) in enumerate(
        ((26, 32), (40, 20), (60, 18), (76, 32), (80, 48), (70, 56), (22, 50), (36, 57), (52, 60))
    ):
        p.path(
            f"M{x} {y} L{x + 4} {y + (3 if i % 2 else -3)}", stroke=("#3f76c8", "#f2c83d", "#4c9f55")[i % 3], width=3
        )


@kind("fried egg", "food", (WHITE,))
def fried_egg(p: Pen, c: str) -> None:
    p.path("M20 30 C34 2 58 18 70 14 C98 12 98 44 88 56 C92 82 66 92 54 84 C36 98 6 84 12 62 C0 50 8 32 20 30", c)
    p.oval(50, 50, 20, 18, "#f2a92f")
    p.oval(43, 43, 5, 4, "#fff3c9", line=False)
