"""What a benchmark is asked to do, and everything it loads for that: model, questions, contestants.

setting = set_up(Benchmark("models/demo", drafts=("sam",), suite="demo"), Watch())
contestants = create_contestants(setting)    # plain decoding first, nobody opened yet
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from paceline.bench.contestant import Contestant
from paceline.bench.environment import environment, machine
from paceline.bench.large import Enlargement, large_folder, parse_size
from paceline.bench.large_draft import large_draft_model, large_spec
from paceline.bench.metrics import BASELINE
from paceline.bench.ours import Ours
from paceline.bench.peers import create_peer, parse_peer
from paceline.bench.record import PEER, Answer
from paceline.bench.runner import LeftOut, Options, QuestionGroup, fitting, grouped
from paceline.bench.scheduled import Contest
from paceline.bench.suites import Question, Suite, read_suite
from paceline.errors import PacelineError, PromptError
from paceline.target.base import Target
from paceline.target.folder import SMALL_FILES, find, gguf_of, is_gguf, tuned_note
from paceline.target.load import load, load_tokenizer
from paceline.target.tokenizer import Tokenizer
from paceline.workbench.transcript import Transcriber


@dataclass(frozen=True)
class Benchmark:
    """What to run. drafts and peers: specs; plain decoding is always added, since all others are compared with it.

    as_large  "1B" and the like: the size to which the model, and every draft model, is enlarged without changing what
              it says.
    contest   schedules and batch sizes to compare; with them every first turn is a request, see `bench.scheduled`.
    template  the chat template, as for replay; None: the tokenizer's own.
    exact     our answers are bit-identical with any drafter and in any batch, as `Engine(exact=True)`;
              None: where that costs no time."""

    model: str
    drafts: Sequence[str] = ()
    peers: Sequence[str] = ()
    suite: str = "demo"
    out: Path = Path("bench")
    limit: int | None = None
    categories: Sequence[str] = ()
    options: Options = field(default_factory=Options)
    as_large: str | None = None
    template: str | None = None
    peer_python: str | None = None
    dtype: str = "auto"
    device: str = "auto"
    exact: bool | None = None
    contest: Contest = field(default_factory=Contest)

    @property
    def compares_schedules(self) -> bool:
        """Whether schedules are compared, and not only drafters."""
        return bool(self.contest.schedules)


@dataclass(frozen=True)
class Watch:
    """Callbacks of a run. say: a sentence; total: the number of answers to come; answered: one more answer;
    judged: differing answers judged, and to be judged; stopped: True ends the run."""

    say: Callable[[str], None] = lambda text: None
    total: Callable[[int], None] = lambda count: None
    answered: Callable[[Answer], None] = lambda answer: None
    judged: Callable[[int, int], None] = lambda done, total: None
    stopped: Callable[[], bool] = lambda: False


@dataclass
class Setting:
    """Everything that is loaded. folder: of the model, enlarged if that was asked for; or its GGUF file."""

    benchmark: Benchmark
    folder: Path
    target: Target
    tokenizer: Tokenizer
    transcriber: Transcriber
    suite: Suite
    groups: list[QuestionGroup]
    left_out: list[LeftOut]
    enlargement: Enlargement | None

    @property
    def dtype(self) -> str:
        """Of the target, by name."""
        return str(self.target.dtype).removeprefix("torch.")

    @property
    def num_questions(self) -> int:
        return sum(len(group.questions) for group in self.groups)

    def question(self, id: str) -> Question:
        """The question of that id."""
        return next(question for question in self.suite.questions if question.id == id)

    def environment(self) -> dict[str, Any]:
        """The machine and the software."""
        return environment(dtype=self.dtype, device=str(self.target.device))


def set_up(benchmark: Benchmark, watch: Watch) -> Setting:
    """Load the model and the questions. PacelineError for what the caller has to change."""
    suite = read_suite(benchmark.suite, limit=benchmark.limit, categories=benchmark.categories)
    size = parse_size(benchmark.as_large) if benchmark.as_large else 0
    enlargement = None
    if is_gguf(benchmark.model):
        folder = gguf_of(benchmark.model)
    else:
        folder = find(benchmark.model, [*SMALL_FILES, "*.safetensors"])
    if size and is_gguf(folder):
        raise PacelineError(f"{folder} cannot be enlarged: --as-large takes a folder, and --dtype int4 its precision")
    if size:
        watch.say(f"enlarging {benchmark.model} to {benchmark.as_large}")
        folder = large_folder(folder, size)
        enlargement = Enlargement.read(folder)
    native = benchmark.contest.native
    target = load(
        folder,
        dtype=benchmark.dtype,
        device=benchmark.device,
        native=native,
        exact=benchmark.exact,
        threads=torch.get_num_threads(),  # the same for all contestants during the whole run
    )
    tokenizer = load_tokenizer(folder)
    target.tokenizer = tokenizer  # drafters compare both with those they were trained for
    transcriber = Transcriber(tokenizer, benchmark.template)
    max_tokens = benchmark.options.max_tokens
    questions = suite.questions
    if benchmark.compares_schedules:
        questions = tuple(replace(question, turns=question.turns[:1]) for question in questions)
    fit, left_out = fitting(questions, transcriber.prompt, max_context=target.max_context, max_tokens=max_tokens)
    if not fit:
        raise PromptError(f"no question of {suite.name} fits: {left_out[0].why}; try a smaller --max-tokens")
    groups = benchmark.contest.groups(fit) if benchmark.compares_schedules else grouped(fit, benchmark.options.batch)
    return Setting(benchmark, folder, target, tokenizer, transcriber, suite, groups, left_out, enlargement)


def create_contestants(setting: Setting) -> list[Contestant]:
    """Plain decoding first, then our drafters, then the peers."""
    target, grown, batch = setting.target, setting.enlargement, setting.benchmark.options.batch
    drafts = dict.fromkeys([BASELINE, *setting.benchmark.drafts])
    specs = [(spec, large_spec(spec, target, grown) if grown else None) for spec in drafts]
    if setting.benchmark.compares_schedules:
        return list(setting.benchmark.contest.contestants(specs, target, setting.tokenizer))
    ours = [Ours(spec, target, setting.tokenizer, batch=batch, made=made) for spec, made in specs]
    return [*ours, *(_peer(spec, setting) for spec in dict.fromkeys(setting.benchmark.peers))]


def _peer(spec: str, setting: Setting) -> Contestant:
    """A peer, its draft model enlarged like the target. A GGUF file is taken to be the enlarged model already."""
    _, config = parse_peer(spec)
    checkpoint = getattr(config, "checkpoint", None)
    made = spec
    if setting.enlargement and checkpoint and not is_gguf(checkpoint):
        if not Path(checkpoint).is_dir():
            raise PacelineError(f"--peer {spec}: --as-large enlarges model folders, and {checkpoint} is not a folder")
        made = spec.replace(checkpoint, str(large_draft_model(checkpoint, setting.enlargement)), 1)
    peer = create_peer(
        made,
        str(setting.folder),
        dtype=setting.dtype,
        threads=torch.get_num_threads(),
        python=setting.benchmark.peer_python,
        batch=setting.benchmark.options.batch,
        max_context=setting.target.max_context,
        decode=setting.tokenizer.decode,
        device=str(setting.target.device),
    )
    peer.name = f"{PEER}{spec}"
    return peer


def open_contestants(contestants: Sequence[Contestant], watch: Watch) -> dict[str, str]:
    """Open all; returns why peers cannot take part, by name. A drafter of ours that cannot is an error."""
    unavailable = {}
    for contestant in contestants:
        watch.say(f"starting {contestant.name}")
        try:
            contestant.open()
        except PacelineError as error:
            if isinstance(contestant, Ours):
                raise
            unavailable[contestant.name] = " ".join(str(error).split()).removeprefix(f"{contestant.name}: ")
    return unavailable


def identity(setting: Setting, contestants: Sequence[Contestant]) -> dict[str, Any]:
    """The part of run.json that makes it this run and no other."""
    benchmark, suite = setting.benchmark, setting.suite
    return {
        "model": benchmark.model,
        "fingerprint": setting.target.weights_fingerprint,
        "as_large": setting.enlargement.describe() if setting.enlargement else None,
        "suite": {
            "name": suite.name,
            "source": suite.source,
            "fingerprint": suite.fingerprint,
            "questions": setting.num_questions,
        },
        "options": {
            **asdict(benchmark.options),
            "limit": benchmark.limit,
            "categories": list(benchmark.categories),
            "template": benchmark.template,
            **(asdict(benchmark.contest) if benchmark.compares_schedules else {}),
            **({"exact": True} if benchmark.exact else {}),
            "methods": [contestant.name for contestant in contestants],
        },
        "machine": machine(setting.environment()),
    }


def description(setting: Setting, contestants: Sequence[Contestant], unavailable: dict[str, str]) -> dict[str, Any]:
    """The rest of run.json: what explains the figures."""
    benchmark, name = setting.benchmark, setting.target.name
    if benchmark.as_large is not None:
        name = f"{Path(benchmark.model).name} as large as {benchmark.as_large}"
    return {
        "model_name": name,
        "tuned": tuned_note(benchmark.model),
        "quantised": " ".join(setting.target.notes) or None,
        "environment": setting.environment(),
        "left_out": [asdict(question) for question in setting.left_out],
        "methods": [facts | {"unavailable": unavailable.get(facts["method"])} for facts in methods(contestants)],
    }


def methods(contestants: Sequence[Contestant]) -> list[dict[str, Any]]:
    """Entries of run.json for methods that take part."""
    return [
        {
            "method": contestant.name,
            "settings": contestant.settings,
            "draft_bytes": contestant.draft_bytes,
            "target_bytes": contestant.target_bytes,
            "lossless": contestant.lossless,
            "unavailable": None,
        }
        for contestant in contestants
    ]
