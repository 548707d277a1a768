"""Record one answer, plain and drafted, and draw both as they grew: docs/pictures/demo.svg, animated without a script.

    python benchmarks/recording.py Qwen2.5-Coder-1.5B-Q4_K_M.gguf --draft suffix

The two run one after another, never at once; times are the measured ones of each round, stretched by --slower.
"""

from __future__ import annotations

import argparse
import textwrap
import time
from collections.abc import Sequence
from html import escape
from pathlib import Path

from paceline.core.sampling import SamplingParams
from paceline.engine.engine import Engine

OUT = Path(__file__).parent.parent / "docs" / "pictures" / "demo.svg"
PROMPT = """Rename the parameter n to count, and add type annotations. Answer with the code alone.

def repeat_words(words, n, separator=" "):
    \"\"\"Return the words, repeated n times and joined by the separator.\"\"\"
    if n < 0:
        raise ValueError("n must not be negative")
    result = []
    for word in words:
        for _ in range(n):
            result.append(word)
    return separator.join(result)
"""
Piece = tuple[int, int, float, str, bool]
"""(row, column, seconds, text, whether it was drafted)."""
COLUMNS, ROW, STEP, WIDTH = 76, 12.0, 5.3, 420
REST = 2.0  # seconds for which the whole answers are shown, before they begin anew; the picture opens with them
STYLE = """text { font: 8.8px ui-monospace, monospace; fill: #1f2328; white-space: pre }
.drafted { fill: #1a7f37; font-weight: 600 }
.head { font: 600 11px system-ui, sans-serif } .small { font: 10px system-ui, sans-serif; fill: #59636e }
.pane { fill: #f6f8fa; stroke: #d1d9e0 }
@media (prefers-color-scheme: dark) { text { fill: #f0f6fc } .drafted { fill: #3fb950 } .small { fill: #9198a1 }
.pane { fill: #151b23; stroke: #3d444d } }"""


def record(engine: Engine, tokens: int) -> tuple[list[tuple[float, str, bool]], float]:
    """(seconds, text, whether it was drafted) of every piece, and the seconds until the end."""
    chat = [{"role": "user", "content": PROMPT}]
    params = SamplingParams(max_tokens=tokens, temperature=0)
    for _ in engine.stream([chat], SamplingParams(max_tokens=4, temperature=0)):
        pass  # kernels are compiled and the prompt is read: what is drawn is decoding
    begin, pieces = time.perf_counter(), []
    for delta in engine.stream([chat], params):
        now = time.perf_counter() - begin
        pieces += [(now, text, bool(source)) for source, text in delta.pieces]
    return pieces, time.perf_counter() - begin


def lines(pieces: list[tuple[float, str, bool]]) -> list[Piece]:
    """Every piece with its place, broken at the end of a line and of the pane."""
    placed, row, column = [], 0, 0
    for when, text, drafted in pieces:
        for i, part in enumerate(text.split("\n")):
            if i:
                row, column = row + 1, 0
            for start in range(0, len(part), COLUMNS):
                piece = part[start : start + COLUMNS]
                if column + len(piece) > COLUMNS:
                    row, column = row + 1, 4
                placed.append((row, column, when, piece, drafted))
                column += len(piece)
    return placed


def pane(y: float, title: str, placed: Sequence[Piece], slower: float, length: float) -> str:
    """One answer, which begins anew every `length` seconds."""
    shapes = [f'<text x="4" y="{y + 13:.0f}" class="head">{escape(title)}</text>']
    for row, column, when, text, drafted in placed:
        if text.strip():
            at = min(when * slower / length, 0.99)
            shown = f'<animate attributeName="opacity" begin="-{length - REST:.2f}s" dur="{length:.2f}s" ' \
                    f'repeatCount="indefinite" calcMode="discrete" keyTimes="0;{at:.4f}" values="0;1"/>'  # fmt: skip
            kind = ' class="drafted"' if drafted else ""
            place = f'x="{8 + column * STEP:.1f}" y="{y + 33 + row * ROW:.0f}" textLength="{len(text) * STEP:.1f}"'
            shapes.append(f'<text {place} opacity="1"{kind}>{escape(text)}{shown}</text>')
    return "\n".join(shapes)


def title(slow: float, fast: float) -> str:
    """What the picture shows, for who does not see it."""
    return f"The same answer, plain in {slow:.1f} seconds and drafted in {fast:.1f}"


def draw(
    model: str, plain: Sequence[Piece], slow: float, name: str, drafted: Sequence[Piece], fast: float,
    slower: float = 1.0,
) -> str:  # fmt: skip
    """The picture. plain, drafted: as `lines` gives them; slow, fast: seconds until their ends."""
    rows = 1 + max(piece[0] for piece in plain)
    length, height = slow * slower + REST, 24 + rows * ROW + 8
    body = []
    panes = ((f"plain: {slow:.1f} s", plain), (f"{name}: {fast:.1f} s, the same text", drafted))
    for i, (heading, placed) in enumerate(panes):
        y = i * (height + 6)
        size = f'width="{WIDTH - 4}" height="{height - 20:.0f}"'
        body.append(f'<rect x="2" y="{y + 19:.0f}" {size} class="pane" rx="4"/>')
        body.append(pane(y, heading, placed, slower, length))
    for i, words in enumerate((f"{model}, two CPU cores", "Green was drafted and accepted.")):
        body.append(f'<text x="4" y="{2 * height + 18 + 13 * i:.0f}" class="small">{escape(words)}</text>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {2 * height + 39:.0f}" width="640" role="img" '
        f'aria-label="{title(slow, fast)}">\n<style>{STYLE}</style>\n' + "\n".join(body) + "\n</svg>\n"
    )


def main() -> None:
    """Answer the prompt twice, check that the two texts are one, and draw them."""
    parser = argparse.ArgumentParser(
        description=textwrap.dedent(__doc__ or ""), formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--draft", default="suffix")
    parser.add_argument("--tokens", type=int, default=140)
    parser.add_argument("--slower", type=float, default=1.0)
    options = parser.parse_args()
    panes = []
    for draft in ("none", options.draft):
        pieces, seconds = record(Engine(options.model, draft=draft), options.tokens)
        panes.append((draft, lines(pieces), seconds))
    (_, plain, slow), (name, drafted, fast) = panes
    assert "".join(p[3] for p in plain) == "".join(p[3] for p in drafted), "the answers differ"
    OUT.parent.mkdir(exist_ok=True)
    OUT.write_text(draw(Path(options.model).stem, plain, slow, name, drafted, fast, options.slower), "utf-8")
    print(f"{OUT}: {title(slow, fast)}")


if __name__ == "__main__":
    main()
