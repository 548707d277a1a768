"""What rounding the inputs of products to eight bits changes, in a model whose weights stay the same.

    python benchmarks/rounding.py model-Q8_0.gguf --text wiki.test.txt.gz --suite question.jsonl

The reference is the model expanded to float32: nothing is rounded. Beside it, over the same positions: the inputs of
all products rounded, all but the output head's, and the head's alone, each as kernels/integer.py rounds them, with all
else in float32 (this works for blocks that cannot be multiplied too); and the model as other dtypes load it. The text,
and the suite's questions in the model's chat template one after another, are read in windows of 256 tokens. Standard
errors, in brackets, are over windows.
"""

from __future__ import annotations

import argparse
import gzip
from copy import copy
from pathlib import Path
from statistics import mean, stdev

import numpy as np
import torch

from paceline.bench.suites import read_suite
from paceline.core.segment import Segment
from paceline.errors import ModelError
from paceline.target.decoder import Decoder
from paceline.target.linear import Linear
from paceline.target.load import load, load_tokenizer
from paceline.workbench.transcript import Transcriber

WINDOW = 256


class Rounded(Linear):
    """A product whose inputs are rounded to eight bits first, 32 at a time."""

    def __init__(self, inner: Linear):
        self.__dict__.update(inner.__dict__)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        parts = x.unflatten(-1, (-1, 32))
        largest = parts.abs().amax(-1, keepdim=True)
        inverse = 127 / largest
        numbers = torch.where(inverse.isfinite(), parts * inverse, 0).round()
        return super().__call__((numbers * (largest / 127)).flatten(-2))


def rounding(target: Decoder, *, layers: bool, head: bool) -> Decoder:
    """The same model, its weights shared, with the inputs of these products rounded."""
    made = copy(target)
    if head:
        made.head = Rounded(target.head)
    if layers:
        made.layers = [copy(layer) for layer in target.layers]
        for layer in made.layers:
            attention = layer.attention = copy(layer.attention)
            attention.qkv, attention.out = Rounded(attention.qkv), Rounded(attention.out)
            layer.mlp.gate_up, layer.mlp.down = Rounded(layer.mlp.gate_up), Rounded(layer.mlp.down)
    return made


def main() -> None:
    """Print a table for each text."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a GGUF file, or a folder of `paceline quantize`")
    parser.add_argument("--text", type=Path, help="held-out text, plain or gzip-compressed")
    parser.add_argument("--suite", type=Path, help="questions in the format of Spec-Bench")
    parser.add_argument("--windows", type=int, default=12, help="of each text")
    wish = parser.parse_args()
    tokenizer = load_tokenizer(wish.model)
    texts: dict[str, list[int]] = {}
    if wish.text:
        data = wish.text.read_bytes()
        data = gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data
        texts[wish.text.name] = tokenizer.encode_text(data.decode()[: 16 * WINDOW * wish.windows])
    if wish.suite:
        transcriber, questions = Transcriber(tokenizer, None), read_suite(str(wish.suite)).questions
        some = questions[:: max(1, len(questions) // (4 * wish.windows))]
        prompts = [transcriber.prompt([{"role": "user", "content": q.turns[0]}]) for q in some]
        texts[f"{wish.suite.name}, chat"] = [token for prompt in prompts for token in prompt[:WINDOW]]
    reference = load(wish.model, dtype="float32", native=True)
    assert isinstance(reference, Decoder)
    ways = {
        "all inputs rounded": rounding(reference, layers=True, head=True),
        "all but the head's": rounding(reference, layers=True, head=False),
        "the head's alone": rounding(reference, layers=False, head=True),
        "bfloat16, none rounded": load(wish.model, dtype="bfloat16", native=True),
    }
    for dtype in ("auto-float32", "auto"):
        try:
            ways[f"dtype {dtype}"] = load(wish.model, dtype=dtype, native=True)
        except ModelError as error:  # blocks that are not multiplied
            print(error)
    for text, ids in texts.items():
        windows = [np.array(ids[at : at + WINDOW]) for at in range(0, len(ids) - WINDOW + 1, WINDOW)][: wish.windows]
        rows: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
        for window in windows:
            right = log_probabilities(reference, window)
            for name, way in ways.items():
                found = log_probabilities(way, window)
                same = (found.argmax(-1) == right.argmax(-1)).float().mean()
                rows[name].append((float(same), float((right.exp() * (right - found)).sum(-1).mean())))
        print(f"{text}: {len(windows) * WINDOW:,} positions")
        for name, both in rows.items():
            top1, kl = zip(*both, strict=True)
            shown = f"same top token {both_of(top1, 100):>13} %   KL {both_of(kl, 1000):>14} / 1000"
            print(f"  {name:24} {shown}", flush=True)


def log_probabilities(target: Decoder, window: np.ndarray) -> torch.Tensor:
    """After every token of a window, [WINDOW, V]."""
    slot = target.add_row(WINDOW)
    segment = Segment(slot, window, np.arange(-1, WINDOW - 1), num_logits=WINDOW)
    logits = target.verify([segment]).logits
    target.drop_row(slot)
    return logits.float().log_softmax(-1)


def both_of(values: tuple[float, ...], times: float) -> str:
    """Mean and standard error."""
    return f"{times * mean(values):.2f} ({times * stdev(values) / len(values) ** 0.5:.2f})"


if __name__ == "__main__":
    main()
