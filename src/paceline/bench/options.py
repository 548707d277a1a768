"""What a benchmark is asked to do. Imports no torch: the command line makes its options of these fields."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from paceline.draft.spec import option


@dataclass(frozen=True)
class Options:
    """How a run asks. batch: questions answered together."""

    max_tokens: int = option(128, "Most new tokens.", names=("--max-tokens", "-n"))
    temperature: float = option(0.0, "0 is greedy.", names=("--temperature", "-t"))
    batch: int = 1
    repeats: int = option(1, "How often everything is asked; medians count.", least=1)
    warm_up: int = option(3, "Answers that every method gives before anything is timed.", least=0)
    seed: int = option(0, "For sampling, at a temperature above 0.", least=0)


@dataclass(frozen=True)
class Benchmark:
    """What to run. drafts and peers: specs; plain decoding is always added, since all others are compared with it.

    schedules  to compare, at every batch size of `batches`; every first turn is then a request, see `bench.ours`.
    template   the chat template, as for replay; None: the tokenizer's own.
    exact      our answers are bit-identical with any drafter and in any batch, as `Engine(exact=True)`;
               None: where that costs no time."""

    model: str = ""
    drafts: Sequence[str] = ()
    peers: Sequence[str] = ()
    suite: str = option(
        "demo", "demo, code-edits, spec-bench, humaneval, speed-bench, or JSON Lines.", names=("--suite", "-s")
    )
    out: Path = Path("bench")
    limit: int | None = option(None, "Most questions, spread evenly over the tasks.", least=1)
    categories: Sequence[str] = ()
    options: Options = field(default_factory=Options)
    template: str | None = option(None, "vicuna, chatml, ..., or a Jinja file. [default: the tokenizer's own]")
    peer_python: str | None = option(None, "The interpreter with vLLM or xllamacpp, or both: vllm=PATH,xllamacpp=PATH.")
    dtype: str = "auto"
    device: str = "auto"
    exact: bool | None = None
    schedules: Sequence[str] = ()
    batches: Sequence[int] = (1,)
