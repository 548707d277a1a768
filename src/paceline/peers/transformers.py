"""transformers' own `generate` as peers: plain, prompt lookup, a draft model. All in this process.

One loaded model serves every peer of a run that uses it. A checkpoint's own generation settings do not reach any of
them: each call gets a configuration made from scratch. Rounds are seen from outside: `generate` hands a streamer the
tokens of each, and a hook tells how wide the forward before it was."""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import Any, Literal
from weakref import WeakValueDictionary

import torch
import transformers
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.generation import BaseStreamer
from transformers.utils import is_sklearn_available

from paceline.core.sampling import SamplingParams
from paceline.draft.spec import option
from paceline.errors import ModelError
from paceline.net.completion import Completion
from paceline.peers.peer import Peer, sampling
from paceline.peers.setup import Rounds, Setup, folder_of, weight_bytes
from paceline.target.hf import quiet


@dataclass(frozen=True)
class LookupConfig:
    tokens: int = option(10, "prompt_lookup_num_tokens: most tokens copied")
    ngram: int = option(2, "max_matching_ngram_size: longest run of tokens looked up")


@dataclass(frozen=True)
class AssistedConfig:
    checkpoint: str
    tokens: int = option(20, "num_assistant_tokens: most tokens drafted a round")
    schedule: Literal["constant", "heuristic", "heuristic_transient"] = option(
        "constant", "num_assistant_tokens_schedule: how `tokens` changes with acceptance"
    )
    confidence: float = option(0.4, "assistant_confidence_threshold: drafting stops below it; 0: off")


class Plain(Peer):
    """One token a forward; several prompts together are padded on the left, as transformers wants them."""

    in_process = True
    alone = False  # Whether `generate` takes one prompt at a time in this mode.

    def __init__(self, name: str, setup: Setup, config: Any = None):
        super().__init__(name, 1 if self.alone else setup.batch, setup.tokenizer, setup.ends)
        self.setup, self.config = setup, config
        self.model: Any = None

    def open(self) -> None:
        if self.setup.threads is not None:
            torch.set_num_threads(self.setup.threads)
        self.model = _shared(self.setup, self.setup.folder, "target")
        self.target_bytes = weight_bytes(self.model.config, self.setup.torch_dtype)
        self.facts = {
            "engine": f"transformers {transformers.__version__}",
            "torch": torch.__version__,
            "dtype": self.setup.dtype,
            "device": str(self.model.device),
            "threads": torch.get_num_threads(),
            "attention": self.model.config._attn_implementation,
            "cache": "dynamic",
            **(asdict(self.config) if self.config is not None else {}),
        }

    def close(self) -> None:
        super().close()
        self.model = None

    def wake(self, seconds: float) -> None:
        token = torch.ones((1, 1), dtype=torch.long, device=self.model.device)
        began = perf_counter()
        with torch.inference_mode():
            while perf_counter() - began < seconds:
                self.model(token).logits.argmax(-1).tolist()

    def answer(self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]) -> list[Completion]:
        asked, limit = params[0], max(self.setup.max_new(prompt, params[0]) for prompt in prompts)
        if not asked.is_greedy and asked.seed is not None:
            torch.manual_seed(asked.seed)
        rounds = _Rounds(perf_counter())
        ignored = warnings.catch_warnings(action="ignore")
        with quiet(), ignored, rounds.listening(self.model, self._assistant()), self._mode():
            ids, mask = padded(prompts, self.model.device)
            out = self.model.generate(
                ids,
                attention_mask=mask,
                generation_config=GenerationConfig(**how(asked, limit), **self._wishes()),
                streamer=rounds,
                **self._helpers(),
            )
            made = out[:, ids.shape[1] :].tolist()
        seconds = perf_counter() - rounds.began
        facts = {"seconds": seconds, **rounds.facts(ids.shape[1])}
        return [self.setup.turn(prompt, row, asked, **facts) for prompt, row in zip(prompts, made, strict=True)]

    # Differences of generate()'s modes ----------------------------------------------------------------------------

    def _wishes(self) -> dict[str, Any]:
        """Entries of the generation configuration."""
        return {}

    def _helpers(self) -> dict[str, Any]:
        """Arguments of generate()."""
        return {}

    def _assistant(self) -> Any:
        """The draft model whose forwards count, if it is another than the target."""
        return None

    @contextmanager
    def _mode(self) -> Iterator[None]:
        """The model as this mode wants it, and as it was afterwards."""
        yield


class Lookup(Plain):
    """Copies what followed the same few tokens (A. Saxena, Prompt Lookup Decoding, 2023)."""

    Config = LookupConfig
    alone = True

    def _wishes(self) -> dict[str, Any]:
        return {"prompt_lookup_num_tokens": self.config.tokens, "max_matching_ngram_size": self.config.ngram}


class Assisted(Plain):
    """A smaller model of the same vocabulary drafts (J. Gante, Assisted Generation, 2023). Its configuration keeps what
    the "heuristic" schedule learns from call to call."""

    Config = AssistedConfig
    config: AssistedConfig
    alone = True

    def open(self) -> None:
        super().open()
        self.forget()
        self.assistant = _shared(self.setup, folder_of(self.config.checkpoint), "assistant")
        theirs, ours = (model.config.get_text_config().vocab_size for model in (self.assistant, self.model))
        if theirs != ours:
            raise ModelError(
                f"{self.name}: the draft model knows {theirs} tokens and the target {ours}; "
                "it must be one of the same tokenizer"
            )
        self.draft_bytes = weight_bytes(self.assistant.config, self.setup.torch_dtype)
        self.facts["confidence_adapts"] = is_sklearn_available()  # transformers silently asks for sklearn.

    def forget(self) -> None:
        self._drafting = _drafting(self.config)

    def close(self) -> None:
        self.assistant = None
        super().close()

    def _helpers(self) -> dict[str, Any]:
        return {"assistant_model": self.assistant}

    def _assistant(self) -> Any:
        return self.assistant

    @contextmanager
    def _mode(self) -> Iterator[None]:
        with _configured(self.assistant, self._drafting):
            yield


class _Rounds(Rounds, BaseStreamer):
    """Listens to generate(). calls: forwards of the assistant."""

    def __init__(self, began: float):
        super().__init__(began)
        self._prompt = True
        self._width = self._drafts = 0

    @contextmanager
    def listening(self, model: Any, assistant: Any) -> Iterator[None]:
        with ExitStack() as hooks:
            hooks.enter_context(model.register_forward_pre_hook(self._forward, with_kwargs=True))
            if assistant is not None:
                hooks.enter_context(assistant.register_forward_pre_hook(self._draft))
            yield

    def _forward(self, module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        self._width = kwargs["input_ids"].shape[1]

    def _draft(self, module: Any, args: Any) -> None:
        self._drafts += 1

    def put(self, value: torch.Tensor) -> None:
        if self._prompt:  # generate() begins with the prompt.
            self._prompt = False
            return
        self.times.append(perf_counter() - self.began)
        self.lengths.append(value.shape[-1] if value.ndim == 2 else 1)  # [1, n] where there are drafts, [B] else
        self.widths.append(self._width)

    def end(self) -> None:
        pass

    def facts(self, prompt: int) -> dict[str, Any]:
        return super().facts(prompt) | {"calls": self._drafts}


def how(params: SamplingParams, limit: int) -> dict[str, Any]:
    """How to answer, as entries of a generation configuration; nothing is left to a checkpoint's own."""
    return {
        "max_new_tokens": limit,
        "do_sample": not params.is_greedy,
        "eos_token_id": list(params.stop_token_ids) or None,
        "pad_token_id": next(iter(params.stop_token_ids), 0),
        "repetition_penalty": params.repetition_penalty,
        **({} if params.is_greedy else sampling(params)),
    }


def _drafting(config: AssistedConfig) -> GenerationConfig:
    """Where generate() looks up how to draft: the drafting model's own generation configuration."""
    return GenerationConfig(
        num_assistant_tokens=config.tokens,
        num_assistant_tokens_schedule=config.schedule,
        assistant_confidence_threshold=config.confidence,
    )


def padded(prompts: Sequence[Sequence[int]], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and mask, [B, T] each, padded on the left."""
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(prompt)) + list(prompt) for prompt in prompts], device=device)
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=device)
    return ids, mask


@contextmanager
def _configured(model: Any, config: GenerationConfig) -> Iterator[None]:
    before, model.generation_config = model.generation_config, config
    try:
        yield
    finally:
        model.generation_config = before


# Models are loaded once a run ----------------------------------------------------------------------------------------

_LOADED: WeakValueDictionary[tuple[str, ...], Any] = WeakValueDictionary()
"""Models in use, by folder, dtype, device and role."""


def _shared(setup: Setup, folder: Path, role: str) -> Any:
    """The model in `folder`, loaded once for all peers that use it; it is dropped when the last of them closes.

    role: a model that is its own draft model is loaded twice, so that the forwards of the two can be distinguished."""
    key = (str(folder), setup.dtype, setup.device, role)
    if (model := _LOADED.get(key)) is None:
        model = _LOADED[key] = load_model(key[0], setup.torch_dtype).to(setup.device)
    return model


def load_model(folder: str, dtype: torch.dtype) -> Any:
    """transformers' own model in `folder`, in evaluation mode, without generation settings of its checkpoint."""
    try:
        with quiet(), warnings.catch_warnings(action="ignore"):
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                folder, dtype=dtype, use_safetensors=True, output_loading_info=True
            )
        model, report = loaded
    except Exception as error:  # Models raise many kinds of errors.
        raise ModelError(f"transformers cannot load {folder}: {' '.join(str(error).split())[:200]}") from None
    if report["missing_keys"]:
        raise ModelError(f"{folder} lacks {min(report['missing_keys'])}, which its config.json asks for")
    model.generation_config = GenerationConfig()
    return model.eval()
