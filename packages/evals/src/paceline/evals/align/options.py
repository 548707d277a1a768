"""Options of `paceline eval align`. Imports neither torch nor packages of the extra `eval`."""

from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from paceline.draft.spec import option
from paceline.engine.options import Draft, ModelOptions
from paceline.net.keys import Keys
from paceline.outputs import check_folder

ALPHA = 0.3  # The paper's value; it recommends 0.2 to 0.5.
COMPAT_CHARACTERS = 8000  # The official code shows the judge so many characters of an answer.


@dataclass(frozen=True)
class Decoding:
    """How tokens are chosen. The server decides fields that are None."""

    GROUP: ClassVar = "Sampling"

    max_tokens: int = option(4200, "Largest number of new tokens of a request.", least=1, names=("--max-tokens", "-n"))
    temperature: float | None = option(
        None,
        "Sampling temperature; 0 is greedy. [default: the server's; our engine: 0]",
        least=0, names=("--temperature", "-t"),
    )
    top_p: float | None = option(None, "Sampling parameter of the same name that is sent to servers.", least=0, most=1)
    top_k: int | None = option(None, "Sampling parameter of the same name that is sent to servers.", least=-1)
    min_p: float | None = option(None, "Sampling parameter of the same name that is sent to servers.", least=0, most=1)
    seed: int | None = option(None, "Seed that makes sampling reproducible, if the server supports it.", least=0)

    @property
    def is_greedy(self) -> bool:
        """Temperature 0: the same request has the same answer."""
        return self.temperature == 0

    def body(self) -> dict[str, Any]:
        """The fields of a request's body."""
        return {key: value for key, value in asdict(self).items() if value is not None}


@dataclass(frozen=True)
class JudgeConfig:
    """How a model judges. In mode sequential replies are tags, whatever `form` says.

    compat   read as the official code does: the first tag of a line counts, and an empty reference is announced.
    repairs  how often to ask again for a reply that cannot be read."""

    GROUP: ClassVar = "Judges"

    mode: Literal["joint", "sequential"] = option(
        "joint", "Judge all rules in one call, or each rule in a call of its own.", names=("--judge-mode",)
    )
    form: Literal["tags", "json"] = option(
        "tags", "Form of the judge's reply on all rules; json sends the server a schema.", names=("--judge-form",)
    )
    reply_tokens: int = option(
        4200, "Largest number of new tokens of a judge's reply.", least=1, names=("--judge-max-tokens",)
    )
    sees: Literal["asked", "plain"] | None = option(
        None, "Prompt that judges see. [default: asked]", names=("--judge-sees",)
    )
    characters: int | None = option(
        None,
        "Largest number of characters of an answer that judges see. [default: all]",
        least=1, names=("--max-chars",),
    )
    compat: bool = False
    repairs: int = 3


@dataclass(frozen=True)
class Scoring:
    """How verdicts become a score (see `figures`)."""

    GROUP: ClassVar = "Scores"

    na: Literal["exclude", "strict"] | None = option(
        None, "How rules that do not apply count: left out, or as not kept. [default: exclude]"
    )
    alpha: float = option(ALPHA, "Score of a safe answer that keeps no behavioural rule.", least=0, most=1)


@dataclass(frozen=True)
class AlignOptions(ModelOptions):
    """The options of the command. pauses: the first and the longest pause between two attempts, seconds."""

    model: str = option(
        help="Model to test: an OpenAI-compatible server, URL[,URL...][#name] up to /v1, or a folder for our own "
        "engine."
    )
    data: str = option(
        "sample", "Prompts and rules: SpecBench's folder or hub id, your own .yaml, sample, or sample,items=N."
    )
    method: str = option(
        "vanilla,align3",
        "Methods, joined by commas: raw, vanilla, zero-think, more-think, align3[,steps=13], self-refine, best-of-n, "
        "tpo.",
    )
    scenario: str | None = option(None, "Scenarios to ask, joined by commas. [default: all]")
    judge: list[str] | None = option(
        None, "Judge: URL#name, a folder, self, or checks (of the sample); may be repeated, to compare judges."
    )
    limit: int | None = option(None, "Largest number of items, taken from scenarios and labels in turn.", least=1)
    out: Path | None = option(
        None, "Folder of the run; the same command goes on with a run that was stopped.", callback=check_folder
    )
    decoding: Decoding = field(default_factory=Decoding)
    thinking: bool = option(
        False, "Say that the endpoint's chat template opens the thought. [--tokenizer shows it]", names=("--thinking",)
    )
    plain_prompts: bool = option(False, "Ask the plain prompts, without their disguise.", names=("--plain-prompts",))
    rules_first: bool = option(
        False,
        "Put the rules before the query; they can then be cached, but the prompt is another one.",
        names=("--rules-first",),
    )
    judging: JudgeConfig = field(default_factory=JudgeConfig)
    scoring: Scoring = field(default_factory=Scoring)
    compat: bool = option(
        False, "Choose as the official code does: --judge-sees plain --max-chars 8000 --na strict.", names=("--compat",)
    )
    reward: str = option(
        "judge",
        "Reward by which best-of-n and tpo choose: judge, the URL of a scoring server, or the folder of a reward "
        "model.",
    )
    concurrency: int = option(
        8, "Number of items under way at once.", least=1, names=("--batch", "-b")
    )
    tries: int = option(8, "Number of attempts at a request.", least=1)
    timeout: float = option(600.0, "Seconds without a byte after which an attempt is given up.", least=0.001)
    stream: bool = option(True, "Ask servers to stream their answers.")
    tokenizer: str | None = option(None, "Tokenizer of the served model, to render prefixes and count injected tokens.")
    keys: Keys = field(default_factory=Keys)
    judge_api_key_env: str | None = option(None, "Environment variable that holds the API key of judges.")
    judge_api_key_file: str | None = option(None, "File with the API key of judges, on one line.", metavar="FILE")
    reuse: bool = option(True, "Let prompts that begin alike share keys and values (our engine).")
    draft: Draft = "suffix,past=16384"
    pauses: tuple[float, float] = (0.5, 30.0)

    @property
    def judge_keys(self) -> Keys:
        """The options for the judges' API key."""
        return Keys(self.judge_api_key_env, self.judge_api_key_file, self.keys.key_over_http)

    def with_compat(self) -> Self:
        """The options with the official code's choices if `compat` is set. Given options win."""
        if not self.compat:
            return self
        sees, characters = self.judging.sees or "plain", self.judging.characters or COMPAT_CHARACTERS
        judging = replace(self.judging, sees=sees, characters=characters, compat=True)
        return replace(self, judging=judging, scoring=replace(self.scoring, na=self.scoring.na or "strict"))
