"""Drafters for vLLM: all that read tokens only, by name.

    LLM(model, speculative_config={"model": "paceline.plugins.vllm.sam", "num_speculative_tokens": 16})

    LLM(model,
        speculative_config={"model": "paceline.plugins.vllm.Proposer", "num_speculative_tokens": 16},
        additional_config={"paceline": {"draft": "suffix,corpus=build/answers"}})

vLLM imports the module before the last dot and reads the rest as its attribute, so any drafter's name works, with "_"
for "-" and "__" for "+". It calls `propose` once a step with all rows of its batch. Rows move, are reused and have no
request id, so a row is recognised by its tokens. vLLM's acceptance rule for chains is right for any draft. Written for
vLLM 0.32's first model runner (`custom_class`); `vllm_v2.py` is for the second."""

import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.core.tree import IntArray
from paceline.draft.recording import Recording
from paceline.errors import MethodError
from paceline.plugins.history import History, HostRow

log = logging.getLogger("vllm.paceline")  # vLLM shows only messages of its own loggers.

OPTIONS = {"draft": str, "paced": bool, "repair": bool}
"""Options in `additional_config["paceline"]`.

draft   the drafter's spec.
paced   cut drafts to what pays at this size of batch; by default true, but false for a model that is split over
        processes, whose clocks differ, and where vLLM verifies drafts of one length only (`vllm_v2.py`).
repair  mend vLLM's sampling with drafts on CPUs without Triton, which reads uninitialised memory (vllm-project/vllm
        issue 55005); true by default."""
FAILURES = 3  # After so many failures a drafter is left out.


class Drafts:
    """One drafter for all requests of an engine, and the row of each: what both of vLLM's runners need.

    paced  whether drafts are cut to what pays, unless the options say otherwise.
    usage  how to name a drafter, for the error if nothing does.
    Raises MethodError for a drafter that does not exist, or needs more than tokens; vLLM then does not start."""

    def __init__(self, vllm_config: Any, spec: str | None, paced: bool, usage: str):
        self.options = _options(vllm_config.additional_config)
        self.spec = spec or self.options.get("draft")
        if self.spec is None:
            raise MethodError(
                f'Which drafter? Name it in additional_config={{"paceline": {{"draft": "sam"}}}}, or use {usage}.'
            )
        self.most = vllm_config.speculative_config.num_speculative_tokens
        self.paced = self.options.get("paced", paced and not _is_split(vllm_config))
        self.limit = vllm_config.model_config.max_model_len
        self.facts = _facts(vllm_config.model_config, self.spec)
        self.history = self._history()
        self.rows: dict[Any, HostRow] = {}
        self.failures = 0

    def chains(self, read: Callable[[], "Step"]) -> dict[Any, IntArray]:
        """The chain, int64, for every row that gained tokens. Catches all errors: one would end the engine."""
        if self.failures < FAILURES:
            try:
                return self._draft(read())
            except Exception:
                self._recover()
        return {}

    def _draft(self, step: "Step") -> dict[Any, IntArray]:
        if step.disturbed or step.gone or step.new:
            self.history.disturbed()
        self.history.advance([self.rows[key] for key in step.gained], list(step.gained.values()))
        for row in step.gone:
            self.history.drop(row)
        for key, text in step.new.items():
            self.rows[key] = self.history.start(text, self.limit - len(text))
        drafting = [key for key in (*step.gained, *step.new) if self.rows[key].max_draft > 0]
        chains = self.history.draft([self.rows[key] for key in drafting]) if drafting else []
        return dict(zip(drafting, chains, strict=True))

    def _history(self) -> History:
        return History(self.spec or "", self.facts, self.most, self.paced)

    def _recover(self) -> None:
        """Begin again with a new drafter; after `FAILURES` failures, without one."""
        self.failures += 1
        last = self.failures == FAILURES
        log.exception(
            "paceline's drafter %s failed; answers are not affected. %s", self.spec,
            "It is left out from now on." if last else "It begins again."
        )  # fmt: skip
        self.rows = {}
        if not last:
            try:
                self.history = self._history()
            except Exception:
                self.failures = FAILURES


@dataclass
class Step:
    """What a step of vLLM did to the rows. Keys are the runner's own: places of a batch, or ids of requests.

    gained     new tokens of rows that go on, at least one each.
    new        whole texts of rows that begin here: the prompt, and the tokens sampled after it.
    gone       rows that have ended, no longer among `Drafts.rows`.
    disturbed  the step's time is no round's: it ran a prompt, too."""

    gained: dict[Any, IntArray]
    new: dict[Any, IntArray]
    gone: list[HostRow]
    disturbed: bool


class Proposer(Drafts):
    """The proposer that vLLM's first runner calls. Its rows have no ids: keys are places in the batch.

    spec  the drafter's; None: `additional_config["paceline"]["draft"]`."""

    def __init__(self, vllm_config: Any, spec: str | None = None):
        super().__init__(vllm_config, spec, True, "paceline.plugins.vllm.sam as the model of speculative_config")
        if self.options.get("repair", True):
            repair_cpu_sampling()

    def load_model(self, target_model: Any) -> None:
        """Nothing to do; vLLM's CPU runner calls it."""

    def propose(
        self, sampled: Sequence[Sequence[int]], lengths: NDArray[np.int32], tokens: NDArray[np.int32],
        slot_mappings: Any = None,
    ) -> list[list[int]]:  # fmt: skip
        """A chain for each row of the batch.

        sampled  the new tokens of each row in this step; none inside a prompt.
        lengths  [rows], tokens of each row now.
        tokens   [rows, max_model_len], vLLM's own buffer of them."""
        chains = self.chains(lambda: self._read(sampled, lengths, tokens))
        return [chains[i].tolist() if i in chains else [] for i in range(len(sampled))]

    def _read(self, sampled: Sequence[Sequence[int]], lengths: NDArray[np.int32], tokens: NDArray[np.int32]) -> Step:
        texts = {i: tokens[i, : lengths[i]].astype(np.int64) for i, new in enumerate(sampled) if len(new)}
        before, self.rows = self.rows, {}
        for i, text in texts.items():
            row = _known(before, i, text[: -len(sampled[i])])
            if row is not None:
                self.rows[i] = row
        gained = {i: texts[i][len(row) :] for i, row in self.rows.items()}
        new = {i: text for i, text in texts.items() if i not in gained}  # Its new tokens count as prompt.
        disturbed = len(texts) < len(sampled)
        for i in list(before):
            if i < len(sampled) and not len(sampled[i]):
                self.rows[i] = before.pop(i)  # The row gained nothing in this step.
        return Step(gained, new, list(before.values()), disturbed)


def _known(before: dict[int, HostRow], i: int, text: NDArray[np.int64]) -> HostRow | None:
    """The row with this text, in the same place or moved, removed from `before`; None: there is none."""
    for place in (i, *before):
        row = before.get(place)
        if row is not None and len(row) == len(text) and np.array_equal(row.tokens, text):
            return before.pop(place)
    return None


def __getattr__(name: str) -> Any:
    return functools.partial(Proposer, spec=spec_of(name))


def spec_of(name: str) -> str:
    """The spec for an attribute's name: "_" stands for "-", "__" for "+". Raises AttributeError for a private name."""
    if name.startswith("_"):
        raise AttributeError(name)
    return name.replace("__", "+").replace("_", "-")


def _options(additional: Any) -> dict[str, Any]:
    """Our part of vLLM's additional_config. Raises MethodError for an unknown option, or a value of another type."""
    options = dict((additional or {}).get("paceline", {}))
    for name, value in options.items():
        if name not in OPTIONS:
            raise MethodError(f'additional_config["paceline"] has {name!r}; it may have {", ".join(OPTIONS)}.')
        if not isinstance(value, OPTIONS[name]):
            raise MethodError(f'additional_config["paceline"]["{name}"] is {value!r}; a {OPTIONS[name].__name__} fits.')
    return options


def _is_split(vllm_config: Any) -> bool:
    """Whether several processes draft for the same requests, so that they must propose the same."""
    return getattr(getattr(vllm_config, "parallel_config", None), "world_size", 1) > 1


def _facts(model: Any, spec: str) -> Recording:
    """The facts of the model: vocabulary size, end tokens, and the tokenizer if the spec names a corpus."""
    ends = getattr(model.hf_config.get_text_config(), "eos_token_id", None)
    eos = () if ends is None else tuple(ends) if isinstance(ends, list | tuple) else (ends,)
    tokenizer = None
    if "corpus" in spec or ":" in spec:  # Files on disk hold token ids, which must be the model's.
        from paceline.formats.tokenizer_files import (
            load_tokenizer,  # This imports all models of transformers, which is slow.
        )

        tokenizer = load_tokenizer(model.tokenizer)
    return Recording(tokenizer, eos, model.get_vocab_size(), name=model.model)


def repair_cpu_sampling() -> bool:
    """Mend vLLM's sampling with drafts on a CPU without Triton; True if it was mended.

    The kernel that repeats a row's temperature, top-k and top-p for every drafted token fills a copy and drops it, and
    the sampler reads uninitialised memory. And a step in which no row has a draft ends the engine where rows have a
    top-k: it takes the maximum of nothing. Does nothing in a vLLM whose function has another name."""
    try:
        import torch
        from vllm.triton_utils import HAS_TRITON
        from vllm.v1.sample import rejection_sampler
    except ImportError:
        return False
    if HAS_TRITON or torch.cuda.is_available() or not hasattr(rejection_sampler, "expand_batch_to_tokens"):
        return False

    def expand(x: Any, cu_num_tokens: Any, num_tokens: int, replace_from: int = 0, replace_to: int = 0) -> Any:
        counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
        replaced = torch.where(x == replace_from, replace_to, x) if replace_from != replace_to else x
        return replaced.to(x.dtype).repeat_interleave(counts)

    filters = rejection_sampler.apply_top_k_top_p

    def filtered(logits: Any, top_k: Any, top_p: Any) -> Any:
        return filters(logits, top_k, top_p) if len(logits) else logits

    rejection_sampler.expand_batch_to_tokens = expand
    rejection_sampler.apply_top_k_top_p = filtered
    log.info("paceline mended sampling with drafts on this CPU (vllm-project/vllm issue 55005)")
    return True


__all__ = ["Drafts", "Proposer", "Step", "repair_cpu_sampling", "spec_of"]
