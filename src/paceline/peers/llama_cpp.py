"""llama.cpp, by way of llama-cpp-python, as a peer: plain, and with its prompt lookup. In this process.

The file must hold the same model as the benchmark's, its tokens numbered the same. Every call of `Llama.eval` is a
round: over the prompt, then over the last token and what was drafted after it."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from time import perf_counter
from typing import Any

from paceline.core.sampling import SamplingParams
from paceline.draft.spec import option
from paceline.errors import ModelError
from paceline.formats.place import gguf_of
from paceline.net.completion import Completion
from paceline.peers import NotInstalled
from paceline.peers.peer import Peer
from paceline.peers.setup import Rounds, Setup


@dataclass(frozen=True)
class PlainConfig:
    checkpoint: str


@dataclass(frozen=True)
class LookupConfig(PlainConfig):
    tokens: int | None = option(None, "num_pred_tokens: most tokens copied; none: 10 on a GPU, 2 on a CPU")
    ngram: int = option(2, "max_ngram_size: longest run of tokens looked up")


class Plain(Peer):
    """One token a forward."""

    in_process = True

    Config: type = PlainConfig

    def __init__(self, name: str, setup: Setup, config: Any):
        super().__init__(name, 1, setup.tokenizer, setup.ends)
        self.setup, self.config = setup, config
        self.llama: Any = None

    def open(self) -> None:
        try:
            import llama_cpp
        except ImportError:
            how = "pip install llama-cpp-python"
            raise NotInstalled(f"{self.name}: llama-cpp-python is not installed: {how}") from None
        file = gguf_of(self.config.checkpoint)
        gpu = self.setup.device != "cpu" and bool(llama_cpp.llama_supports_gpu_offload())
        drafting = self._drafting(gpu)
        draft_model = self._draft_model(drafting)
        try:
            self.llama = llama_cpp.Llama(
                model_path=str(file),
                n_ctx=self.setup.max_context,
                n_threads=self.setup.threads,
                n_threads_batch=self.setup.threads,
                n_gpu_layers=-1 if gpu else 0,
                draft_model=draft_model,
                logits_all=draft_model is not None,  # Without it drafts fail after n_batch tokens.
                verbose=False,
            )
        except (ValueError, RuntimeError, OSError) as error:
            reason = " ".join(str(error).split())[:200]
            raise ModelError(f"{self.name}: llama.cpp cannot load {file}: {reason}") from None
        self.target_bytes = file.stat().st_size
        self.facts = {
            "engine": f"llama-cpp-python {llama_cpp.__version__}",
            "file_type": self.llama.metadata.get("general.file_type"),
            "device": "gpu" if gpu else "cpu",
            "threads": self.llama.n_threads,
            **asdict(self.config),
            **drafting,
        }

    def _drafting(self, gpu: bool) -> dict[str, int]:
        """Arguments of the draft model, where there is one."""
        return {}

    def _draft_model(self, drafting: dict[str, int]) -> Any:
        return None

    def close(self) -> None:
        super().close()
        if self.llama is not None:
            self.llama.close()
            self.llama = None

    def answer(self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]) -> list[Completion]:
        (prompt,), (asked,), llama = prompts, params, self.llama
        limit = self.setup.max_new(prompt, asked)
        if asked.seed is not None:
            llama.set_seed(asked.seed)
        llama.reset()  # Earlier prompts must not be reused.
        tokens, ends = [], set(asked.stop_token_ids)
        began = perf_counter()
        rounds = _Rounds(llama, began)
        stream = llama.generate(list(prompt), reset=True, **_sampling(asked))
        try:
            for token in stream:
                tokens.append(int(token))
                rounds.token()
                if token in ends or len(tokens) >= limit:
                    break
            seconds = perf_counter() - began
        finally:
            stream.close()
            rounds.close()
        return [self.setup.turn(prompt, tokens, asked, seconds=seconds, **rounds.facts(len(prompt)))]


class Lookup(Plain):
    """LlamaPromptLookupDecoding: what followed the first place with the same few tokens."""

    Config = LookupConfig

    def _drafting(self, gpu: bool) -> dict[str, int]:
        tokens = self.config.tokens if self.config.tokens is not None else 10 if gpu else 2
        return {"num_pred_tokens": tokens, "max_ngram_size": self.config.ngram}

    def _draft_model(self, drafting: dict[str, int]) -> Any:
        from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

        return LlamaPromptLookupDecoding(**drafting)


class _Rounds(Rounds):
    """Counts a Llama's calls of `eval` and the tokens that come of each."""

    def __init__(self, llama: Any, began: float):
        super().__init__(began)
        self.llama = llama
        self._eval = llama.eval
        llama.eval = self._count

    def _count(self, tokens: Sequence[int]) -> None:
        self._eval(tokens)
        self.widths.append(len(tokens))

    def token(self) -> None:
        if len(self.lengths) < len(self.widths):
            self.lengths.append(0)
            self.times.append(0.0)
        self.lengths[-1] += 1
        self.times[-1] = perf_counter() - self.began  # a round's tokens are its own when the last of them is

    def close(self) -> None:
        del self.llama.eval


def _sampling(params: SamplingParams) -> dict[str, float]:
    """Only the sampling that is asked for; llama.cpp's own defaults are off."""
    wanted = {"top_k": params.top_k, "top_p": params.top_p, "repeat_penalty": params.repetition_penalty}
    return {"temp": params.temperature, "min_p": 0.0, "typical_p": 1.0, **wanted}
