"""What a matrix product over few rows costs on this CPU: milliseconds of a model's linear layers by rows.

    python benchmarks/rows.py models/demo

float32, one thread, torch's own product, all weights of the model one after another, so that none is in a cache; the
least of several passes.
"""

from __future__ import annotations

import argparse
from time import process_time

import torch
from transformers import AutoModelForCausalLM

ROWS = (*range(1, 21), 24, 25, 32, 33, 48, 49, 64)
PASSES = 7


def main() -> None:
    """One line: rows and milliseconds."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("model")
    given = parser.parse_args()
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(given.model, dtype=torch.float32)
    weights = [module.weight.detach() for module in model.modules() if isinstance(module, torch.nn.Linear)]
    least = dict.fromkeys(ROWS, float("inf"))
    for _ in range(PASSES):
        for rows in ROWS:
            inputs = {width: torch.randn(rows, width) for width in {weight.shape[1] for weight in weights}}
            _pass(weights, inputs)
            began = process_time()
            _pass(weights, inputs)
            least[rows] = min(least[rows], process_time() - began)
    print(", ".join(f"{rows}: {1e3 * seconds:.2f}" for rows, seconds in least.items()))


def _pass(weights: list[torch.Tensor], inputs: dict[int, torch.Tensor]) -> None:
    for weight in weights:
        torch.nn.functional.linear(inputs[weight.shape[1]], weight)


if __name__ == "__main__":
    main()
