"""llama.cpp's server, by way of the wheel xllamacpp, as a contestant: plain, or with any of its drafters.

It runs in a process of its own, with the interpreter of an environment of its own. There a client asks the server over
HTTP on the same machine, as its users do; time is taken by that client, from the request to the end of the answer.
The wheel is built for AVX2, whatever the processor has: `llama_cpp.py` runs a llama.cpp that was built for it."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from paceline.draft.spec import option
from paceline.errors import PacelineError
from paceline.target.folder import gguf_of
from paceline.workbench.contestant import Ask, Reply
from paceline.workbench.peers.setup import Setup
from paceline.workbench.peers.worker import InWorker, environment

WORKER = Path(__file__).with_name("xllamacpp_worker.py")
START_SECONDS = 600.0


@dataclass(frozen=True)
class ServerConfig:
    checkpoint: str
    spec: Literal[
        "none", "ngram-simple", "ngram-cache", "ngram-map-k", "ngram-map-k4v", "ngram-mod", "draft-simple",
        "draft-eagle3", "draft-dflash", "draft-dspark",
    ] = option("none", "the server's speculative type, with its default sizes")  # fmt: skip
    file: str | None = option(None, "of draft-...: GGUF file of the drafter; of ngram-cache: its static cache")
    k: int | None = option(None, "of draft-...: most tokens drafted; none: the server's default", least=1)


class Server(InWorker):
    """One slot, prompts computed whole."""

    Config = ServerConfig
    engine = "xllamacpp"
    how = "python -m venv ENV && ENV/bin/pip install xllamacpp, then --peer-python xllamacpp=ENV/bin/python"

    def __init__(self, name: str, setup: Setup, config: ServerConfig):
        super().__init__(name, setup, config, max_batch=1)

    def open(self) -> None:
        file = gguf_of(self.config.checkpoint).resolve()
        self.target_bytes = file.stat().st_size
        drafter = None if self.config.file is None else str(gguf_of(self.config.file).resolve())
        if drafter is None and self.config.spec.startswith("draft-"):
            raise PacelineError(f"{self.name}: {self.config.spec} needs file=FILE.gguf, as plugins/to_gguf writes it")
        asked = {"model": str(file), "max_context": self.setup.max_context, "threads": self.setup.threads}
        drafting = {"spec": self.config.spec, "file": drafter, "k": self.config.k}
        self.start(WORKER, environment(self.setup), asked | drafting, START_SECONDS)
        self.settings |= {"device": "cpu", "asked": "over HTTP on this machine", **asdict(self.config)}

    def forget(self) -> None:
        """Some of its drafters keep what was said before, so it starts anew."""
        if self.worker is not None and self.config.spec != "none":
            self.ask({"forget": True}, START_SECONDS)

    def answer(self, prompts: Sequence[Sequence[int]], ask: Ask) -> list[Reply]:
        if len(prompts) > 1:
            raise PacelineError(f"{self.name} answers 1 at a time, not {len(prompts)}.")
        (prompt,) = prompts
        asked = {"prompt": list(map(int, prompt)), "limit": self.setup.max_new(prompt, ask)}
        row = self.ask({**asked, **ask.sampling(), "seed": ask.seeds[0] if ask.seeds else 0})
        times, lengths, nodes = rounds(row["events"])
        facts = {name: row[name] for name in ("seconds", "peak_bytes")}
        return [self.setup.turn(prompt, row["tokens"], ask, lengths=lengths, times=times, nodes=nodes, **facts)]


def rounds(events: Sequence[tuple[float, int, int, int]]) -> tuple[list[float], list[int], list[int]]:
    """When the tokens of each round came, how many they were, and how many were drafted.

    events  of every event its seconds, its tokens, and the tokens drafted and accepted since the request. The tokens of
            a round come one by one, after the numbers of their round: a draft of which a were accepted brings a + 1."""
    times: list[float] = []
    lengths: list[int] = []
    nodes: list[int] = []
    drafted = accepted = open_tokens = 0
    for seconds, count, drafted_now, accepted_now in events:
        if open_tokens <= 0:
            open_tokens = accepted_now - accepted + 1
            lengths.append(0)
            times.append(0.0)
            nodes.append(drafted_now - drafted)
            drafted, accepted = drafted_now, accepted_now
        lengths[-1] += count
        times[-1] = seconds
        open_tokens -= count
    return times, lengths, nodes
