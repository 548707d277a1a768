"""llama.cpp's server, by way of the wheel xllamacpp, as a peer: plain, or with any of its drafters.

It is run by `llama_server.py` with the interpreter of an environment of its own, one slot, prompts computed whole. The
wheel is built for AVX2, whatever the processor has: `llama_cpp.py` runs a llama.cpp that was built for it."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from paceline.draft.spec import option
from paceline.errors import PacelineError
from paceline.formats.place import gguf_of
from paceline.peers.served import Served
from paceline.peers.setup import Setup

SCRIPT = Path(__file__).with_name("llama_server.py")
INSIDE = "draft-mtp"  # the type of a drafter that the model's own file brings
FACTS = """
import json, xllamacpp
print(json.dumps({"engine": f"xllamacpp {xllamacpp.__version__}", "system": xllamacpp.get_system_info()}))
"""


@dataclass(frozen=True)
class ServerConfig:
    checkpoint: str
    spec: Literal[
        "none", "ngram-simple", "ngram-cache", "ngram-map-k", "ngram-map-k4v", "ngram-mod", "draft-simple",
        "draft-eagle3", "draft-dflash", "draft-dspark", "draft-mtp",
    ] = option("none", "the server's speculative type, with its default sizes")  # fmt: skip
    file: str | None = option(None, "of draft-...: GGUF file of the drafter; of ngram-cache: its static cache")
    k: int | None = option(None, "of draft-...: most tokens drafted; none: the server's default", least=1)


class Server(Served):
    """One slot, prompts computed whole."""

    Config = ServerConfig
    engine = "xllamacpp"
    how = "python -m venv ENV && ENV/bin/pip install xllamacpp, then --peer-python xllamacpp=ENV/bin/python"

    def __init__(self, name: str, setup: Setup, config: ServerConfig):
        super().__init__(name, setup, config, slots=1)
        self.learns = config.spec != "none"  # Some of its drafters remember earlier texts.

    def open(self) -> None:
        self.target_bytes = gguf_of(self.config.checkpoint).stat().st_size
        if self.config.file is None and self.config.spec.startswith("draft-") and self.config.spec != INSIDE:
            raise PacelineError(f"{self.name}: {self.config.spec} needs file=FILE.gguf, as plugins/to_gguf writes it")
        self.facts |= {"device": "cpu", "threads": self.setup.threads, **asdict(self.config)}
        self.facts |= self.installed(FACTS)
        super().open()

    def command(self) -> list[str]:
        options = {
            "model": gguf_of(self.config.checkpoint).resolve(), "context": self.setup.max_context, "port": "{port}",
            "threads": self.setup.threads, "spec": self.config.spec, "k": self.config.k,
            "file": None if self.config.file is None else gguf_of(self.config.file).resolve(),
        }  # fmt: skip
        words = [word for name, value in options.items() if value is not None for word in (f"--{name}", str(value))]
        return [self.python(), str(SCRIPT), *words]
