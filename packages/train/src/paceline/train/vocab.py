"""Counts which tokens a target writes, for drafters that draft only the most frequent ones (VocabTrim).

Goel et al. 2025 (arXiv 2506.22694): the tokens are counted in the target's answers to prompts of the intended domain.
The answers to a tenth of the prompts are kept aside; the report says how much of them the best K tokens cover. Other
tokens cannot be drafted. `paceline.formats.heads.vocab` uses the counts."""

from collections.abc import Iterable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig

from paceline.draft.spec import option
from paceline.errors import PacelineError
from paceline.formats.gguf import end_tokens as end_tokens_of
from paceline.formats.gguf_file import GGUF
from paceline.formats.heads import vocab
from paceline.formats.heads.vocab import Vocabulary, most_frequent, vocab_size
from paceline.formats.place import gguf_of, is_gguf
from paceline.formats.tokenizer import Tokenizer
from paceline.outputs import check_file as writable
from paceline.outputs import check_folder, output
from paceline.target.load import SMALL_FILES, find, load_tokenizer, read_config
from paceline.train.data import Example, read_examples
from paceline.train.options import AnswerOptions, TargetName, use_threads
from paceline.train.saving import coverage, must_keep, save_vocabulary

ASIDE = 10  # One prompt in so many is kept aside for the report, with its answers.
ENOUGH = 50  # Counted tokens needed per kept token; with fewer, chance decides which rare tokens are kept.
LARGE, LARGE_KEEP = 100_000, 32_768
"""A vocabulary of at least LARGE tokens is trimmed to LARGE_KEEP, a smaller one to a quarter."""
VOCABULARY = rb'(?s).{8}\{"__metadata__":\{"paceline"'  # Such a file begins so.
SHARES = (16, 8, 4, 2)  # Coverage is reported for the vocabulary's size divided by these.

Counts = dict[str, Tensor]  # How often each token was counted, int64 [V], by source.
Covered = dict[str, Any]  # A row of `covered`.


def count_tokens(examples: Iterable[Example], size: int) -> tuple[Counts, Counts, int]:
    """(counts over nine tenths of the prompts, counts over the others, number of answers). An answer without a known
    prompt counts as a prompt of its own. Ids from `size` on are padding of the vocabulary and are not counted."""
    sides: tuple[Counts, Counts] = ({}, {})
    prompts: dict[str, dict[object, int]] = {}
    number = 0
    for number, example in enumerate(examples, 1):
        numbers = prompts.setdefault(example.source, {})
        place = numbers.setdefault(tuple(example.prompt) if example.prompt else number, len(numbers) + 1)
        side = sides[place % ASIDE == 0]
        if example.source not in side:
            side[example.source] = torch.zeros(size, dtype=torch.int64)
        ids = torch.tensor([i for i in example.tokens if i < size], dtype=torch.int64)
        side[example.source] += torch.bincount(ids, minlength=size)
    return *sides, number


def count_vocabulary(
    examples: Iterable[Example], tokenizer: Tokenizer, ends: Sequence[int], keep: int | None = None
) -> Vocabulary:
    """Count the tokens of `examples`. PacelineError if there are none, MethodError for a wrong `keep`.

    keep  default size of the trimmed vocabulary; None: 32,768 of 100,000 or more, else a quarter.

    The vocabulary's facts have the coverage of answers that were not counted ("aside"), where there are enough."""
    size = vocab_size(tokenizer)
    counted, aside, number = count_tokens(examples, size)
    if not any(int(c.sum()) for c in counted.values()):
        raise PacelineError("there is nothing to count: the answers hold no tokens")
    must = must_keep(tokenizer, ends)
    if keep is None:
        keep = LARGE_KEEP if size >= LARGE else max(size // 4, 1)
    best = [most_frequent(sum_of(counted), k, must) for k in sorted({*_sizes(size), keep})]
    whole = together(counted, aside)
    facts: dict[str, Any] = {
        "tokenizer_name": tokenizer.name,
        "replies": number,
        "tokens": {name: int(c.sum()) for name, c in whole.items()},
        "aside": bool(aside),
        "coverage": [covered(tokens, aside or counted) for tokens in best],
    }
    total = sum_of(whole)
    return Vocabulary(most_frequent(total, keep, must), total, must, tokenizer.fingerprint, facts)


def _sizes(vocabulary: int) -> list[int]:
    return [max(vocabulary // share, 1) for share in SHARES]


def together(one: Counts, other: Counts) -> Counts:
    """The sum of both counts by source; `one` has every source."""
    return {name: c + other[name] if name in other else c for name, c in one.items()}


def sum_of(counts: Counts) -> Tensor:
    """Counts over all sources, int64 [V]."""
    return torch.stack(list(counts.values())).sum(0)


def covered(keep: Tensor, counts: Counts) -> Covered:
    """The share of the counted tokens that `keep` covers: {"k": its size, "all": ..., and by source}."""
    shares = {"all": sum_of(counts), **counts}
    return {"k": len(keep)} | {name: round(coverage(c, keep), 5) for name, c in shares.items()}


def end_tokens(model: str | Path) -> list[int]:
    """Tokens that end an answer of a model, as its files say; none for a tokenizer's file."""
    if is_gguf(model):
        return sorted(end_tokens_of(GGUF(gguf_of(model)).metadata))
    if Path(model).is_file():
        return []
    folder = find(model, SMALL_FILES)
    named = [getattr(read_config(folder).get_text_config(), "eos_token_id", None)]
    if (folder / "generation_config.json").exists():
        named.append(GenerationConfig.from_pretrained(folder).eos_token_id)
    return sorted({i for ids in named for i in (ids if isinstance(ids, list) else [ids]) if i is not None})


def train_vocabulary(
    model: str | Path, files: Sequence[Path], out: Path, keep: int | None = None, questions: Path | None = None
) -> list[str]:
    """Count the target's recorded answers and write the vocabulary to `out`: a .safetensors file, or the folder of a
    drafter, as paceline/vocab.safetensors. Returns lines of a report."""
    tokenizer = load_tokenizer(model)
    examples = chain.from_iterable(read_examples(file, tokenizer, questions) for file in files)
    vocabulary = count_vocabulary(examples, tokenizer, end_tokens(model), keep)
    save_vocabulary(place_of(out), vocabulary)
    return report(vocabulary, place_of(out))


def check(model: str | Path, files: Sequence[Path], file: Path, questions: Path | None = None) -> list[str]:
    """How well a vocabulary covers recorded answers, in lines of a report."""
    tokenizer, known = load_tokenizer(model), vocab.read_vocabulary(place_of(file))
    if known.tokenizer and known.tokenizer != tokenizer.fingerprint:
        raise PacelineError(f"{file} is a vocabulary of another tokenizer than {tokenizer.name}'s")
    size = vocab_size(tokenizer)
    examples = chain.from_iterable(read_examples(file, tokenizer, questions) for file in files)
    one, other, number = count_tokens(examples, size)
    counts = together(one, other)
    maps = {len(known.keep): known.keep}
    if known.counts is not None:
        maps |= {k: known.best(k) for k in _sizes(size)}
    return [
        f"{number:,} answers; {place_of(file)} keeps {len(known.keep):,} tokens by default",
        *_table([covered(maps[k], counts) for k in sorted(maps)]),
    ]


def place_of(out: Path) -> Path:
    """The file for `--out`, which is that file or a folder."""
    return out if out.suffix == ".safetensors" else out / vocab.FILE


@output
def _check_out(out: Path | None) -> Path | None:
    if out is not None:
        check_folder(place_of(out).parent)
        writable(place_of(out) if place_of(out).exists() else None, VOCABULARY)
    return out


def report(vocabulary: Vocabulary, file: Path) -> list[str]:
    """What was counted, in lines of a report."""
    facts, keep = vocabulary.facts, len(vocabulary.keep)
    tokens = sum(facts["tokens"].values())
    lines = [f"{facts['replies']:,} answers, {tokens:,} tokens; {file} keeps {keep:,} by default"]
    if not facts["aside"]:
        lines.append("too few prompts to keep some aside: the coverage is of what was counted, and so too high")
    lines += _table(facts["coverage"])
    if tokens < ENOUGH * keep:
        lines.append(f"chance still decides which rare tokens are kept: {ENOUGH} x {keep:,} tokens would settle it")
    return lines


def _table(rows: Sequence[Covered]) -> list[str]:
    names = [name for name in rows[0] if name != "k"]
    widths = {name: max(len(name), 7) for name in names}
    return [
        f"{'K':>7}" + "".join(f"  {name:>{widths[name]}}" for name in names),
        *(f"{row['k']:7,}" + "".join(f"  {row[name]:{widths[name]}.2%}" for name in names) for row in rows),
    ]


def command(
    setup: AnswerOptions,
    target: TargetName,
    more: list[Path] | None = option(None, "More files of answers.", metavar="[FILE]...", argument=True),
    text: list[Path] | None = option(
        None, "JSON Lines file of the target's answers; more files may follow.", metavar="FILE"
    ),
    questions: Path | None = option(
        None, "Spec-Bench's question.jsonl, which has the categories of its answers.", dir_okay=False
    ),
    out: Path | None = option(
        None, "Where to write the vocabulary: a .safetensors file, or the folder of a drafter.", callback=_check_out
    ),
    keep: int | None = option(
        None, "Number of tokens that vocab=FILE keeps. [default: a quarter; 32,768 of 100,000 or more]", least=1
    ),
    check_file: Path | None = option(
        None, "Vocabulary to check: report how well it covers the answers, and write nothing.", names=("--check",)
    ),
) -> None:
    """Count which tokens a target writes, for drafters with a trimmed vocabulary (`vocab=K`).

    paceline train tools vocab smollm2 --text answers.jsonl more.jsonl --out build/vocab.safetensors

    paceline train tools vocab smollm2 --prompts mine=prompts.jsonl --generate 2000 --out build/vocab.safetensors

    With --text, a SentencePiece file is target enough.
    Only answers are counted. The answers to a tenth of the prompts are kept aside: the report says by source how much
    of them the most frequent tokens cover, for several sizes. Generated answers are kept next to OUT; the same command
    goes on from there."""
    use_threads(setup.threads)
    if bool(out) == bool(check_file):
        raise PacelineError("say where to write the vocabulary, --out, or which one to check, --check")
    files = [*(text or []), *(more or [])]
    if setup.generate and out:
        files.append(setup.answer(target, place_of(out).with_suffix(".answers.jsonl")))
    if not files:
        raise PacelineError("there is nothing to count: name recorded answers, --text, or say how many to --generate")
    if check_file:
        lines = check(target, files, check_file, questions)
    else:
        assert out is not None
        lines = train_vocabulary(target, files, out, keep, questions)
    print("\n".join(lines))
