"""Everything that needs a GPU, in one command of some minutes: are answers the same there, and how fast are they.

    python benchmarks/gpu.py --out build/gpu --minutes 8             # what there is time for, the most important first
    python benchmarks/gpu.py --out build/gpu --only exact mirror     # these parts
    python benchmarks/gpu.py --out build/gpu --cpu --minutes 6       # the same script, small, without a GPU
    python benchmarks/gpu.py train --out build/gpu --minutes 5       # write answers, and train eagle3 on them
    python benchmarks/gpu.py table --out build/gpu                   # print what OUT/results.jsonl holds

A part runs in a process of its own, which ends with its share of the time; whatever it has measured stands in
OUT/results.jsonl by then, and whatever broke stands there as an error. Parts:

    lossless  greedy answers and those to seeds beside plain decoding's, for a table of drafters
    bench     `paceline bench` of SmolLM2 in batches of 1, 8 and 32, beside transformers; its folders are OUT/bench-*
    shapes    forwards of large shapes with random weights, the round outside the forward, recorded lengths replayed
    rollouts  answers of reinforcement learning with and without those of the last epoch; schedules of batches
    mirror    a draft model beside the target, on the same device or on a second one
    exact     what equal bits in every batch would cost, and what `--exact` says
    memory    what weights, cache, heads and recorded forwards take, and what happens when there is none left

Needs models/demo and its drafters, and SmolLM2's file (--smollm2; in a checkout it is the installed package's).
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parent.parent
SHARES = {
    "lossless": 0.22, "bench": 0.3, "shapes": 0.18, "rollouts": 0.12, "exact": 0.05, "memory": 0.05, "mirror": 0.08,
}  # fmt: skip
"""Of the time, by part, in the order in which they run."""

REUSE = (("vanilla", "none"), ("residual", "past-answer"), ("residual", "past-answer,first=8"))
"""Rules and drafters of rollouts with the answers of the last epoch."""

Row = dict[str, Any]


# Running the parts ---------------------------------------------------------------------------------------------------


def run(asked: argparse.Namespace) -> int:
    """Run the parts, each in its process and share of the time; 0: none of them broke."""
    began, until = time.monotonic(), time.monotonic() + 60 * asked.minutes
    asked.out.mkdir(parents=True, exist_ok=True)
    wanted = [part for part in SHARES if not asked.only or part in asked.only]
    broken = []
    for at, part in enumerate(wanted):
        left = until - time.monotonic()
        seconds = left * SHARES[part] / sum(SHARES[later] for later in wanted[at:])
        words = [sys.executable, __file__, "part", part, "--out", str(asked.out), "--seconds", f"{seconds:.0f}"]
        words += ["--smollm2", asked.smollm2, *(["--cpu"] if asked.cpu else [])]
        status = ended(words, seconds + 15)
        print(f"{part}: exit status {status}, {time.monotonic() - began:.0f} s of {60 * asked.minutes:.0f}", flush=True)
        if status:
            broken.append(part)
            write(asked.out, {"part": part, "error": f"exit status {status}"})
    show(asked.out)
    return 1 if broken else 0


def ended(words: Sequence[str], seconds: float) -> int:
    """The exit status of a command, which is interrupted, and killed 10 seconds later, when its time is up."""
    with subprocess.Popen(words, cwd=REPOSITORY) as process:
        for stop in (signal.SIGINT, signal.SIGKILL):
            try:
                return process.wait(seconds)
            except subprocess.TimeoutExpired:
                process.send_signal(stop)
                seconds = 10
        return process.wait()


def write(out: Path, row: Row) -> None:
    """Add a line to the results."""
    with (out / "results.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")


class Part:
    """A part that runs: what it was asked for, its deadline, and its results.

    device  "cuda" or "cpu"; small: on a CPU, where everything is tried with little."""

    def __init__(self, asked: argparse.Namespace):
        import torch

        self.name, self.out, self.smollm2 = asked.name, asked.out, asked.smollm2
        self.small = asked.cpu
        self.device = "cpu" if asked.cpu else "cuda"
        self.card = "cpu" if asked.cpu else torch.cuda.get_device_name()
        self.until = time.monotonic() + asked.seconds

    @property
    def left(self) -> float:
        return self.until - time.monotonic()

    def row(self, **facts: Any) -> None:
        """Write a line of results, and say it."""
        write(self.out, {"part": self.name, "card": self.card, **facts})
        print("  " + "  ".join(f"{key} {value}" for key, value in facts.items()), flush=True)

    def each(self, cases: Sequence[Any], act: Callable[..., None]) -> None:
        """`act` for every case that there is time for; a case that breaks is a line, and the next one follows."""
        for at, case in enumerate(cases):
            case = case if isinstance(case, tuple) else (case,)
            if self.left < 5:
                self.row(left_out=len(cases) - at, first=" ".join(map(str, case)))
                return
            try:
                act(*case)
            except Exception as error:
                traceback.print_exc()
                self.row(case=" ".join(map(str, case)), error=f"{type(error).__name__}: {error}".splitlines()[0][:300])


# Lossless ------------------------------------------------------------------------------------------------------------

DRAFTS = (
    "eagle3:models/demo-eagle3", "eagle:models/demo-eagle", "medusa:models/demo-medusa",
    "model:models/demo-draft,tree=8",
    "model:models/demo-draft,stop=fixed,draft=3", "kangaroo:models/demo-kangaroo,stop=fixed,draft=3",
    "eagle3:models/demo-eagle3,tree=0,draft=3", "mirror:models/demo-draft",
    "suffix", "sam", "prompt-lookup", "recycling,tree=16", "ngram-pool", "hierarchy", "jacobi", "auto",
)  # fmt: skip
TIE = {"float32": 1e-3, "bfloat16": 0.26}
"""Logits nearer than this may swap by rounding: two steps of bfloat16 near 30."""


def lossless(part: Part) -> None:
    """Greedy answers and sampled ones of every drafter, beside plain decoding in batches of one."""
    from paceline.bench.suites import read_suite
    from paceline.core.sampling import SamplingParams
    from paceline.engine.engine import Engine
    from paceline.target.load import load

    asked = [[{"role": "user", "content": one.turns[0]}] for one in read_suite("demo").questions]
    count, new = (4, 24) if part.small else (24, 64)

    def compare(dtype: str) -> None:
        target = load(REPOSITORY / "models/demo", device=part.device, dtype=dtype)
        assert target.tokenizer is not None
        prompts = [target.tokenizer.encode_chat(chat) for chat in asked[:: len(asked) // count][:count]]
        greedy = SamplingParams(max_tokens=new)
        hot = SamplingParams(max_tokens=new, temperature=0.8, top_p=0.95)
        sampled = [replace(hot, seed=seed) for seed in range(len(prompts))]
        plain = Engine(target, max_batch=1, reuse=False)
        texts = [one.tokens for one in plain.generate(prompts, greedy)]
        samples = [one.tokens for one in plain.generate(prompts, sampled)]

        def one(draft: str, batch: int) -> None:
            began = time.monotonic()
            engine = Engine(target, draft, max_batch=batch, reuse=False)
            done = engine.generate(prompts, greedy)
            same = [a == b.tokens for a, b in zip(texts, done, strict=True)]
            gaps = [gap(target, p, a, b.tokens) for p, a, b in zip(prompts, texts, done, strict=True) if a != b.tokens]
            facts: Row = {"draft": draft, "dtype": dtype, "batch": batch, "answers": len(same), "same": sum(same)}
            facts |= {"ties": sum(one <= TIE[dtype] for one in gaps), "widest_gap": round(max(gaps, default=0.0), 4)}
            facts["drafted"] = sum(one.stats.draft_tokens for one in done)
            facts["accepted"] = sum(n * times for one in done for n, times in enumerate(one.stats.accepted))
            seeded = engine.generate(prompts, sampled)
            facts["same_sampled"] = sum(a == b.tokens for a, b in zip(samples, seeded, strict=True))
            failed = facts["ties"] < len(gaps) or (dtype == "float32" and facts["same_sampled"] < len(same))
            part.row(**facts, failed=failed, seconds=round(time.monotonic() - began, 1))

        cases = [(draft, batch) for draft in DRAFTS for batch in (8, 1)]
        part.each(cases[:: 6 if part.small else 1], one)

    part.each(("float32", "bfloat16"), compare)


def gap(target: Any, prompt: list[int], one: list[int], other: list[int]) -> float:
    """How far apart the logits of the two tokens are at which two answers part."""
    import numpy as np

    from paceline.core.segment import Segment

    at = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), None)
    if at is None:
        return float("inf")  # one of them ends
    ids = np.array([*prompt, *one[:at]], np.int64)
    slot = target.add_row(len(ids) + 1)
    logits = target.verify([Segment(slot, ids, np.arange(-1, len(ids) - 1), num_logits=1)]).logits[-1].float()
    target.drop_row(slot)
    return abs(float(logits[one[at]] - logits[other[at]]))


# End to end ----------------------------------------------------------------------------------------------------------

DFLASH, DRAFT = "build/smollm2/dflash", "build/smollm2/draft"


def bench(part: Part) -> None:
    """`paceline bench` of SmolLM2, a run for each batch size."""
    family = "demo" if part.small else "smollm2"
    model = str(REPOSITORY / "models/demo") if part.small else part.smollm2
    drafts = ["suffix", "sam", "auto", f"eagle3:models/{family}-eagle3"]
    drafts += [f"dflash:{DFLASH}"] if not part.small and made(part, DFLASH) else []
    cases = [(1, 6, 96), (8, 16, 64), (32, 64, 64)] if not part.small else [(1, 1, 16), (4, 4, 8)]

    def one(batch: int, limit: int, new: int) -> None:
        out = part.out / f"bench-{batch}"
        options = {"device": part.device, "dtype": "bfloat16", "max-tokens": new, "limit": limit, "batch": batch}
        options |= {"out": out, "repeats": 1 if part.small else 3}
        peers = ("transformers", "transformers-lookup") if batch == 1 else ("transformers",)
        ask(part, model, options, [*(("--draft", one) for one in drafts), *(("--peer", peer) for peer in peers)])
        for method in figures(out):
            part.row(batch=batch, **method)

    part.each(cases, one)


def made(part: Part, folder: str) -> bool:
    """Whether a drafter of SmolLM2 that does not ship is there; if not, a line says so."""
    if not (REPOSITORY / folder).exists():
        part.row(without=folder, because="zoo/smollm2.toml makes it, and has not")
    return (REPOSITORY / folder).exists()


def ask(part: Part, model: str, options: Row, more: Sequence[tuple[str, str]]) -> None:
    """Run `paceline bench`; what it has by the end of the part's time stays."""
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    words = [sys.executable, "-m", "paceline", "bench", model, *words, *(word for pair in more for word in pair)]
    if status := ended(words, part.left):
        part.row(run=str(options["out"].name), error=f"paceline bench ended with {status}")


def figures(out: Path) -> Iterator[Row]:
    """What a run of `paceline bench` found, by method."""
    from paceline.bench.report import read_run

    if (out / "summary.json").exists():
        for method in read_run(out).methods:
            names = ("answers", "speedup", "tokens_per_second", "mean_accepted_tokens", "identical")
            found = {name: method.get(name) for name in names}
            yield {"method": method.name, **{k: round(v, 3) if isinstance(v, float) else v for k, v in found.items()}}


# Large shapes --------------------------------------------------------------------------------------------------------


def configurations(small: bool) -> dict[str, Any]:
    """Shapes by name. Of the experts' model as many layers as fit twice into a card."""
    from transformers import LlamaConfig, Qwen3MoeConfig

    from forward import SHAPES

    experts = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True}
    wide = {"hidden_size": 2048, "num_attention_heads": 32, "head_dim": 128, "vocab_size": 151936}
    if small:
        tiny = {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 2048}
        few = experts | {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
        return {
            "tiny": LlamaConfig(**tiny, num_hidden_layers=4, intermediate_size=512),
            "tiny experts": Qwen3MoeConfig(**tiny, **few, num_hidden_layers=2, head_dim=64),
        }
    return {
        "1B": LlamaConfig(
            hidden_size=2048, num_hidden_layers=16, num_attention_heads=32, num_key_value_heads=8, head_dim=64,
            intermediate_size=8192, vocab_size=128256, max_position_embeddings=4096, tie_word_embeddings=True,
        ),
        "7B": SHAPES["7B"],
        "30B-A3B, 12 of 48 layers": Qwen3MoeConfig(
            **wide, **experts, num_hidden_layers=12, num_key_value_heads=4, intermediate_size=6144,
            max_position_embeddings=4096,
        ),
    }  # fmt: skip


def random_decoder(config: Any, device: str) -> Any:
    """A decoder of that shape with random weights in bfloat16."""
    import torch

    from paceline.formats.shape import weight_shapes
    from paceline.target.decoder import Decoder

    torch.manual_seed(0)

    def drawn(name: str, shape: tuple[int, ...]) -> torch.Tensor:
        if len(shape) == 1:
            return torch.ones(shape, dtype=torch.bfloat16, device=device)
        return torch.randn(shape, dtype=torch.bfloat16, device=device) * 0.02

    weights = {name: drawn(name, shape) for name, shape in weight_shapes(config).items()}
    return Decoder(config, weights, name="random", dtype=torch.bfloat16, device=device)


def bandwidth(device: str) -> float:
    """Bytes a second that the device reads and writes in a large copy."""
    import torch

    from forward import median_ms

    one = torch.empty(1 << (26 if device == "cpu" else 31), dtype=torch.uint8, device=device)
    other = torch.empty_like(one)
    return 2e3 * one.nbytes / median_ms({"copy": lambda _: other.copy_(one)}, [1], 11)["copy", 1]


class Recorded:
    """An acceptance rule that accepts as many drafted tokens as a recording says, whatever the target thinks of them.

    The time of a round is that of the target's own choice: all nodes' best tokens are looked at, as greedily."""

    name, lossless = "recorded", False

    def __init__(self) -> None:
        self.take = 0

    def decide(self, cursors: Sequence[Any]) -> list[Any]:
        import torch

        from paceline.core.accept import follow

        best = torch.cat([cursor.logits for cursor in cursors]).argmax(-1).tolist()
        for cursor in cursors:
            for _ in range(min(self.take, len(cursor.tree) - 1)):
                follow(cursor, int(cursor.tree.tokens[cursor.node + 1]))
            follow(cursor, -1 - best[0])
            cursor.done.tokens[-1] = best[0]
        return []


def recording(out: Path, method: str) -> list[tuple[int, int]]:
    """(drafted, accepted) of the rounds of a method in the run of batch 1; made-up ones where there is no run."""
    from paceline.bench.record import ANSWERS, read_answers

    file = out / "bench-1" / ANSWERS
    answers = [a for a in read_answers(file) if a.method == method and not a.failed] if file.exists() else []
    rounds = [
        (nodes - 1, length - 1)
        for answer in answers
        for turn in answer.turns
        for nodes, length in zip(turn.nodes, turn.lengths, strict=True)
        if nodes and length
    ]
    return rounds or [(4, 2), (0, 0), (7, 7), (0, 0), (3, 0)]


def shapes(part: Part) -> None:
    """Milliseconds of forwards beside the time that reading the weights takes, and rounds of the engine."""
    import numpy as np

    from forward import CONTEXT, Guess, engine_share, filled_rows, median_ms, nodes
    from paceline.core.sampling import SamplingParams
    from paceline.core.tree import DraftTree
    from paceline.draft.base import Drafter
    from paceline.engine.engine import Engine

    bytes_a_second = bandwidth(part.device)
    part.row(bandwidth_gb_s=round(bytes_a_second / 1e9))
    widths = (1, 4, 8, 16, 64)
    rounds = 5 if part.small else 31

    class Replaying(Drafter):
        """Drafts chains as long as the recording's."""

        name = "replaying"

        def __init__(self, rule: Recorded, recorded: list[tuple[int, int]]):
            self.rule, self.recorded, self.at = rule, recorded, 0

        def propose(self, asks: Any) -> list[DraftTree]:
            drafted, self.rule.take = self.recorded[self.at % len(self.recorded)]
            self.at += 1
            return [DraftTree.chain(row.last_token, [7] * min(drafted, most)) for row, most in asks]

    def one(name: str, config: Any) -> None:
        decoder = random_decoder(config, part.device)
        prompt = np.random.default_rng(0).integers(0, decoder.vocab_size, CONTEXT)
        (slot,) = filled_rows(decoder, 1, 128)

        def forward(n: int) -> None:
            decoder.verify([nodes(slot, range(-1, n - 1))])

        times = median_ms({"paceline": forward}, widths, rounds)
        bound = 1e3 * decoder.weight_bytes / bytes_a_second
        facts: Row = {"shape": name, "weights_gb": round(decoder.weight_bytes / 1e9, 2), "bound_ms": round(bound, 3)}
        facts["forward_ms"] = {n: round(times["paceline", n], 3) for n in widths}
        decoder.drop_row(slot)
        for depth, heat in ((0, 0.0), (7, 0.0), (0, 0.8)):
            ms, share = engine_share(decoder, depth, rounds, heat)
            facts[f"round_{depth}_drafted_t{heat:g}_ms"] = round(ms, 3)
            facts[f"outside_{depth}_drafted_t{heat:g}_ms"] = round(ms * share, 3)
        part.row(**facts)
        for method in ("none", "suffix", "sam", "eagle3:models/smollm2-eagle3"):
            rule, recorded = Recorded(), recording(part.out, method)
            recorded = [(0, 0)] if method == "none" else recorded
            drafter = Guess(0) if method == "none" else Replaying(rule, recorded)
            seconds = []
            for _ in range(3):  # the first records the forwards
                engine = Engine(decoder, drafter, rule=rule, reuse=False)
                params = SamplingParams(max_tokens=24 if part.small else 256, ignore_eos=True)
                began = time.perf_counter()
                (done,) = engine.generate([prompt.tolist()], params)
                seconds.append((time.perf_counter() - began) / done.new_tokens)
            mean = done.new_tokens / done.rounds
            speed = round(1 / min(seconds[1:]), 1)
            part.row(shape=name, replayed=method, tokens_per_s=speed, mean_accepted=round(mean, 2))

    part.each([*configurations(part.small).items()], one)


# Rollouts and batches ------------------------------------------------------------------------------------------------


def rollouts(part: Part) -> None:
    """Epochs of rollouts with and without the answers of the last one; then schedules of batches."""
    import torch
    from transformers import AutoModelForCausalLM

    from paceline.bench.suites import read_suite
    from paceline.core.sampling import SamplingParams
    from paceline.rollout import RolloutStore
    from paceline.rollout.policy import Policy
    from paceline.rollout.run import rollout
    from paceline.target.load import load_tokenizer
    from paceline.train.trainer import training_folder

    model_name = str(REPOSITORY / "models/demo") if part.small else part.smollm2
    tokenizer = load_tokenizer(model_name)
    chats = [[{"role": "user", "content": one.turns[0]}] for one in read_suite("demo").questions]
    prompts = [tokenizer.encode_chat(chat) for chat in chats[: 2 if part.small else 32]]
    dtype = torch.float32 if part.small else torch.bfloat16
    model = AutoModelForCausalLM.from_pretrained(training_folder(model_name), dtype=dtype).to(part.device)
    before = [weight.detach().clone() for weight in model.parameters()]
    ends, params = [tokenizer.eos_token_id or 0], SamplingParams(temperature=1.0, max_tokens=8 if part.small else 64)

    def epochs(batch: int) -> None:
        given = prompts if batch > 8 else prompts[:8]
        copies = 1 if batch <= 32 else 4
        with torch.no_grad():
            for weight, old in zip(model.parameters(), before, strict=True):
                weight.copy_(old)
        filled = RolloutStore()
        with Policy(model, "none", eos_token_ids=ends, max_batch=batch).engine() as engine:
            rollout(engine, given, filled, copies=copies, params=params)
        generator = torch.Generator(part.device).manual_seed(0)
        with torch.no_grad():
            for weight in model.parameters():
                noise = torch.randn(weight.shape, generator=generator, device=part.device)
                weight += 0.02 * weight.std() * noise.to(weight)
        for rule, draft in REUSE:
            store = RolloutStore()
            store.load_state_dict(filled.state_dict())
            with Policy(model, draft, eos_token_ids=ends, max_batch=batch).engine() as engine:
                rollout(engine, given[:1], RolloutStore(), params=params)  # warm
                of = rollout(engine, given, store, copies=copies, params=params, rule=rule, version=1).figures
            facts = {"answers": of.answers, "tokens": of.tokens, "decoded": of.decoded, "reuse": round(of.reuse, 3)}
            part.row(rows=batch, rule=rule, draft=draft, **facts, seconds=round(of.seconds, 2))

    part.each((2,) if part.small else (32, 128, 8), epochs)
    out = part.out / "bench-schedules"
    options = {"device": part.device, "dtype": "float32" if part.small else "bfloat16", "out": out}
    options |= {"schedule": "ragged,equal,grouped", "batch": "2" if part.small else "8,32"}
    options |= {"max-tokens": 8 if part.small else 48, "limit": 4 if part.small else 48}
    ask(part, model_name, options, [("--draft", "suffix")])
    for method in figures(out):
        part.row(**method)


# Mirror, exact, memory -----------------------------------------------------------------------------------------------


def mirror(part: Part) -> None:
    """A draft model in a process of its own beside the target, and the same model in turn with it."""
    import torch

    from paceline.bench.suites import read_suite
    from paceline.core.sampling import SamplingParams
    from paceline.engine.engine import Engine
    from paceline.target.load import load

    model, draft = str(REPOSITORY / "models/demo"), "models/demo-draft"
    if not part.small and made(part, DRAFT):
        model, draft = part.smollm2, DRAFT
    target = load(model, device=part.device, dtype="bfloat16")
    where = "" if torch.cuda.device_count() < 2 else ",device=cuda:1"
    questions = read_suite("demo", limit=2 if part.small else 8).questions
    chats = [[{"role": "user", "content": one.turns[0]}] for one in questions]
    params = SamplingParams(max_tokens=8 if part.small else 64)

    def one(spec: str) -> None:
        engine = Engine(target, spec, max_batch=1, reuse=False)
        engine.generate(chats, params)
        began = time.perf_counter()
        done = engine.generate(chats, params)
        seconds, tokens = time.perf_counter() - began, sum(one.new_tokens for one in done)
        mean = tokens / sum(one.rounds for one in done)
        hits = getattr(getattr(engine.drafter, "counts", None), "hit_rate", None)
        part.row(draft=spec, tokens_per_s=round(tokens / seconds, 1), mean_accepted=round(mean, 2), hit_rate=hits)

    part.each(("none", f"model:{draft},stop=fixed", f"mirror:{draft}{where}", f"mirror:{draft},where=line"), one)


def exact(part: Part) -> None:
    """What `--exact` says here, whether a row's logits depend on its company, and what forwards of one width cost."""
    import numpy as np
    import torch

    from forward import filled_rows, median_ms
    from paceline.core.segment import Segment
    from paceline.errors import PacelineError
    from paceline.target.load import load

    try:
        load(REPOSITORY / "models/demo", device=part.device, dtype="bfloat16", exact=True)
        part.row(exact="is computed")
    except PacelineError as error:
        part.row(exact=f"is refused: {error}")
    widths = (1, 2, 4, 8, 16, 32, 64)
    for name, config in configurations(part.small).items():
        if part.left < 10 or "experts" in name or name.startswith("30B"):
            continue
        decoder = random_decoder(config, part.device)
        slots = filled_rows(decoder, 2, 144)
        tokens = np.random.default_rng(1).integers(0, decoder.vocab_size, 64)

        def chain(n: int, decoder: Any = decoder, tokens: Any = tokens, slot: int = slots[0]) -> Any:
            verdict = decoder.verify([Segment(slot, tokens[:n], np.arange(-1, n - 1), num_logits=n)])
            return verdict.logits.clone()

        alone = [chain(n)[0] for n in widths]
        equal = [bool(torch.equal(alone[0], one)) for one in alone]
        apart = [float((alone[0].float() - one.float()).abs().max()) for one in alone]
        times = median_ms({"chain": chain}, widths, 5 if part.small else 31)
        # With one width for every forward, the library has one kernel for every product, and no row sees its company.
        changed = tokens.copy()
        changed[1:] = np.random.default_rng(2).integers(0, decoder.vocab_size, 63)
        wide = decoder.verify([Segment(slots[1], changed, np.arange(-1, 63), num_logits=64)]).logits
        part.row(
            shape=name,
            first_row_equal_by_width=dict(zip(widths, equal, strict=True)),
            furthest_logit=round(max(apart), 4),
            equal_with_other_company_at_64=bool(torch.equal(chain(64)[0], wide[0])),
            always_64_over_1=round(times["chain", 64] / times["chain", 1], 3),
            ms={n: round(times["chain", n], 3) for n in widths},
        )
        del decoder


def memory(part: Part) -> None:
    """Bytes on the device: weights, cache, recorded forwards, a head; and the line of a cache that does not fit."""
    import torch

    from paceline.core.sampling import SamplingParams
    from paceline.engine.engine import Engine
    from paceline.errors import PacelineError
    from paceline.target.load import load

    def used() -> int:
        return 0 if part.small else int(torch.cuda.memory_allocated())

    def reserved() -> int:
        return 0 if part.small else int(torch.cuda.memory_reserved())

    before = used()
    model = str(REPOSITORY / "models/demo") if part.small else part.smollm2
    target = load(model, device=part.device, dtype="bfloat16")
    loaded = used() - before
    facts: Row = {"weights_mb": round(target.weight_bytes / 1e6, 1), "loaded_mb": round(loaded / 1e6, 1)}
    prompts = [f"Write {n} words about the sea." for n in range(32)]
    for batch in (1, 32):
        engine = Engine(target, "suffix", max_batch=batch, reuse=False)
        held, taken = used(), reserved()
        for _ in range(2):
            engine.generate(prompts[:batch], SamplingParams(max_tokens=8 if part.small else 128))
        recorder = getattr(target, "recorder", None)
        facts[f"batch_{batch}"] = {
            "cache_mb": round(target.cache.nbytes / 1e6, 1),
            "more_used_mb": round((used() - held) / 1e6, 1),
            "more_reserved_mb": round((reserved() - taken) / 1e6, 1),
            "recorded_forwards": len(recorder._recordings) if recorder else 0,
        }
    head = "models/demo-eagle3" if part.small else "models/smollm2-eagle3"
    if (REPOSITORY / head).exists():
        held = used()
        Engine(target, f"eagle3:{head}", max_batch=1, reuse=False)
        facts["eagle3_mb"] = round((used() - held) / 1e6, 1)
    part.row(**facts)
    if part.small:
        return
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info()[0]
    hog = torch.empty(free - (300 << 20), dtype=torch.uint8, device=part.device)  # leave 300 MB
    try:
        engine = Engine(target, "none", max_batch=32, reuse=False, cache_memory="64GB")
        chats = [prompt * 60 for prompt in prompts]
        done = engine.generate(chats, SamplingParams(max_tokens=64))
        part.row(case="no memory left", finished=sorted({one.finish_reason for one in done}))
    except PacelineError as error:
        part.row(case="no memory left", line=str(error))
    finally:
        del hog


# Training ------------------------------------------------------------------------------------------------------------


def train(asked: argparse.Namespace) -> int:
    """Write answers in large batches, half greedy and half at temperature 1, and train eagle3 on all there are.

    Both halves go on where they were stopped; the head and its checkpoint lie in OUT in pieces of at most 15 MB."""
    asked.out.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    answers = asked.out / "answers.jsonl"
    generate(asked, answers, began + 60 * asked.minutes * asked.share)
    left = asked.minutes - (time.monotonic() - began) / 60 - 0.4
    head, checkpoints = asked.out / "smollm2-eagle3", asked.out / "run-eagle3"
    words = [sys.executable, "-m", "paceline.train", "eagle3", asked.smollm2, "--data", str(answers)]
    words += [word for file in asked.data for word in ("--data", file)]
    words += ["--out", str(head), "--checkpoints", str(checkpoints), "--minutes", f"{left:.2f}", "--length", "512"]
    words += ["--rows", str(asked.rows), "--vocab", "8192", "--stored", "int8", "--lr", str(asked.lr)]
    words += ["--steps", str(asked.steps)]
    status = ended(words, 60 * left + 60)
    for file in [f for f in (*head.glob("*"), *asked.out.glob("answers.jsonl")) if f.stat().st_size > PIECE]:
        split(file)
    return status


PIECE = 15 << 20


def split(file: Path) -> None:
    """Write a file's pieces beside it: FILE.0, FILE.1, ...; `cat FILE.*` joins them."""
    data = file.read_bytes()
    for at in range(0, len(data), PIECE):
        file.with_name(f"{file.name}.{at // PIECE}").write_bytes(data[at : at + PIECE])


def generate(asked: argparse.Namespace, out: Path, until: float) -> None:
    """Add answers of transformers' model, sampled from its own law, to a file as `paceline.train` reads it.

    All rows of a batch begin together, padded on the left, so that thousands of them run in one forward."""
    import torch
    from transformers import AutoModelForCausalLM

    from paceline.target.load import load_tokenizer
    from paceline.train.data import parse_sources
    from paceline.train.generated import openings
    from paceline.train.trainer import training_folder

    tokenizer = load_tokenizer(asked.smollm2)
    device = "cpu" if asked.cpu else "cuda"
    dtype = torch.float32 if asked.cpu else torch.bfloat16
    model = AutoModelForCausalLM.from_pretrained(training_folder(asked.smollm2), dtype=dtype).to(device).eval()
    prompts = openings(parse_sources(asked.prompts), tokenizer, 384, asked.seed)
    done = {json.loads(line)["id"] for line in out.read_text().splitlines()} if out.exists() else set()
    end = tokenizer.eos_token_id or 0
    for begin in range(0, len(prompts), asked.batch):
        if time.monotonic() > until:
            break
        name = f"gpu {asked.seed} {begin}"
        if f"{name} 0" in done:
            continue
        chunk, greedy = prompts[begin : begin + asked.batch], (begin // asked.batch) % 2 == 0
        width = max(len(ids) for _, ids in chunk)
        ids = torch.tensor([[end] * (width - len(p)) + p for _, p in chunk], device=device)
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for _, p in chunk], device=device)
        torch.manual_seed(asked.seed + begin)
        own: Row = {"do_sample": False} if greedy else {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
        with torch.inference_mode():
            made = model.generate(ids, attention_mask=mask, max_new_tokens=asked.max_tokens, pad_token_id=end, **own)
        lines = []
        for n, ((source, prompt), new) in enumerate(zip(chunk, made[:, width:].tolist(), strict=True)):
            new = new[: new.index(end) + 1] if end in new else new
            lines.append(json.dumps({"id": f"{name} {n}", "source": source, "prompt_tokens": prompt, "tokens": new}))
        with out.open("a") as file:
            file.write("".join(f"{line}\n" for line in lines))
        print(f"{begin + len(chunk):,} of {len(prompts):,} prompts answered", flush=True)


# Showing -------------------------------------------------------------------------------------------------------------


def show(out: Path) -> None:
    """Print the results as Markdown."""
    file = out / "results.jsonl"
    print("\n".join(tables([json.loads(line) for line in file.read_text().splitlines()] if file.exists() else [])))


def tables(rows: Sequence[Row]) -> Iterator[str]:
    """Lines of Markdown, a table for rows of one kind."""
    kinds: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        kinds.setdefault(tuple(row), []).append(row)
    for names, of in kinds.items():
        yield from ("", f"| {' | '.join(names)} |", f"|{'---|' * len(names)}")
        yield from (f"| {' | '.join(str(row[name]) for name in names)} |" for row in of)


PARTS: dict[str, Callable[[Part], None]] = {
    "lossless": lossless, "bench": bench, "shapes": shapes, "rollouts": rollouts, "exact": exact, "memory": memory,
    "mirror": mirror,
}  # fmt: skip


def main() -> int:
    """Run what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", default="run", choices=["run", "part", "train", "table"])
    parser.add_argument("name", nargs="?", choices=[*PARTS], help="of `part`")
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--seconds", type=float, default=60.0, help="of `part`")
    parser.add_argument("--only", nargs="+", choices=[*PARTS], help="these parts")
    parser.add_argument("--cpu", action="store_true", help="small, on a CPU: a test of this script")
    parser.add_argument("--smollm2", default="smollm2", help="its file (default: the installed package's)")
    parser.add_argument("--prompts", action="append", default=[], help="train: NAME=FILE, as `paceline train`")
    parser.add_argument("--data", action="append", default=[], help="train: answers written before")
    parser.add_argument("--share", type=float, default=0.45, help="train: of the time in which answers are written")
    parser.add_argument("--batch", type=int, default=1024, help="train: answers written at once")
    parser.add_argument("--max-tokens", type=int, default=192, help="train: of an answer")
    parser.add_argument("--rows", type=int, default=32, help="train: of a batch")
    parser.add_argument("--steps", type=int, default=3, help="train: depth that is learnt")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    asked.out = asked.out.resolve()
    sys.path.insert(0, str(REPOSITORY))  # for the tests' statistics
    paths = [*map(str, REPOSITORY.glob("packages/*/src")), str(REPOSITORY / "src"), str(REPOSITORY)]
    os.environ["PYTHONPATH"] = os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")])
    if asked.what == "table":
        show(asked.out)
        return 0
    if asked.what == "train":
        return train(asked)
    if asked.what == "part":
        os.chdir(REPOSITORY)
        PARTS[asked.name](Part(asked))
        return 0
    import torch

    if not asked.cpu and not torch.cuda.is_available():
        print("error: there is no CUDA device; --cpu runs the same script, small, on a CPU", file=sys.stderr)
        return 2
    return run(asked)


if __name__ == "__main__":
    sys.exit(main())
