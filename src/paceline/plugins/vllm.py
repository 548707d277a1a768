"""Drafters for vLLM: all that read tokens only, by name.

    LLM(model, speculative_config={"model": "paceline.plugins.vllm.sam", "num_speculative_tokens": 16})

    LLM(model,
        speculative_config={"model": "paceline.plugins.vllm.Proposer", "num_speculative_tokens": 16},
        additional_config={"paceline": {"draft": "blend,corpus=build/answers"}})

vLLM imports the module before the last dot and reads the rest as its attribute, so any drafter's name works, with "_"
for "-" and "__" for "+". It calls `propose` once a step with all rows of its batch. Rows move, are reused and have no
request id, so a row is recognised by its tokens. vLLM's acceptance rule for chains is right for any draft. Written for
vLLM 0.32 (V1 runner, `custom_class`)."""

import functools
import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.draft.recording import Recording
from paceline.errors import MethodError
from paceline.plugins.history import History, HostRow

log = logging.getLogger("vllm.paceline")  # vLLM shows messages of its own loggers only

OPTIONS = {"draft": str, "paced": bool, "repair": bool}
"""Options in `additional_config["paceline"]`.

draft   the drafter's spec.
paced   cut drafts to what pays at this size of batch; by default true, but false for a model that is split over
        processes, whose clocks differ.
repair  mend vLLM's sampling with drafts on CPUs without Triton, which reads uninitialised memory (vllm-project/vllm
        issue 55005); true by default."""
FAILURES = 3  # failures of a drafter before it is left out


class Proposer:
    """The proposer that vLLM calls: one drafter for all requests of an engine.

    spec  the drafter's; None: `additional_config["paceline"]["draft"]`.
    Raises PacelineError for a drafter that does not exist, or needs more than tokens; vLLM then does not start."""

    def __init__(self, vllm_config: Any, spec: str | None = None):
        options = _options(vllm_config.additional_config)
        self.spec = spec or options.get("draft")
        if self.spec is None:
            raise MethodError(
                'Which drafter? Name it in additional_config={"paceline": {"draft": "sam"}}, or use '
                "paceline.plugins.vllm.sam as the model of speculative_config."
            )
        self.most = vllm_config.speculative_config.num_speculative_tokens
        self.paced = options.get("paced", not _is_split(vllm_config))
        self.limit = vllm_config.model_config.max_model_len
        self.facts = _facts(vllm_config.model_config, self.spec)
        self.history = self._history()
        self.rows: dict[int, HostRow] = {}
        self.failures = 0
        if options.get("repair", True):
            repair_cpu_sampling()

    def load_model(self, target_model: Any) -> None:
        """Nothing to do; vLLM's CPU runner calls it."""

    def propose(
        self, sampled: Sequence[Sequence[int]], lengths: NDArray[np.int32], tokens: NDArray[np.int32],
        slot_mappings: Any = None,
    ) -> list[list[int]]:  # fmt: skip
        """A chain for each row of the batch. Catches all errors, because an exception would end the engine.

        sampled  the new tokens of each row in this step; none inside a prompt.
        lengths  [rows], tokens of each row now.
        tokens   [rows, max_model_len], vLLM's own buffer of them."""
        if self.failures < FAILURES:
            try:
                return self._propose(sampled, lengths, tokens)
            except Exception:
                self._recover()
        return [[] for _ in sampled]

    def _propose(
        self, sampled: Sequence[Sequence[int]], lengths: NDArray[np.int32], tokens: NDArray[np.int32]
    ) -> list[list[int]]:
        texts = {i: tokens[i, : lengths[i]].astype(np.int64) for i, new in enumerate(sampled) if len(new)}
        before, self.rows = self.rows, {}
        known = {i: _known(before, i, text[: -len(sampled[i])]) for i, text in texts.items()}
        if len(texts) < len(sampled) or before or None in known.values():  # a prompt ran, or a row has ended
            self.history.disturbed()
        known_rows = {i: row for i, row in known.items() if row is not None}
        self.history.advance(list(known_rows.values()), [texts[i][len(row) :] for i, row in known_rows.items()])
        # For a new row, right after its prompt, its new tokens count as prompt.
        self.rows = {i: known[i] or self.history.start(text, self.limit - len(text)) for i, text in texts.items()}
        for i, row in before.items():
            if i < len(sampled) and not len(sampled[i]) and i not in self.rows:
                self.rows[i] = row  # it gained nothing in this step
            else:
                self.history.drop(row)
        drafting = [i for i in texts if self.rows[i].max_draft > 0]
        chains = self.history.draft([self.rows[i] for i in drafting]) if drafting else []
        drafts: list[list[int]] = [[] for _ in sampled]
        for i, chain in zip(drafting, chains, strict=True):
            drafts[i] = chain.tolist()
        return drafts

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


def _known(before: dict[int, HostRow], i: int, text: NDArray[np.int64]) -> HostRow | None:
    """The row with this text, in the same place or moved, removed from `before`; None: there is none."""
    for place in (i, *before):
        row = before.get(place)
        if row is not None and len(row) == len(text) and np.array_equal(row.tokens, text):
            return before.pop(place)
    return None


def __getattr__(name: str) -> Any:
    if name.startswith("_"):
        raise AttributeError(name)
    return functools.partial(Proposer, spec=name.replace("__", "+").replace("_", "-"))


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
    if "corpus" in spec or ":" in spec:  # files on disk hold token ids, which must be the model's
        from paceline.target.load import load_tokenizer  # slow: imports all models of transformers

        tokenizer = load_tokenizer(model.tokenizer)
    return Recording(tokenizer, eos, model.get_vocab_size(), name=model.model)


def repair_cpu_sampling() -> bool:
    """Mend vLLM's sampling with drafts on a CPU without Triton; True if it was mended.

    The kernel that repeats a row's temperature, top-k and top-p for every drafted token fills a copy and drops it, and
    the sampler reads uninitialised memory. Does nothing in a vLLM whose function has another name."""
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

    rejection_sampler.expand_batch_to_tokens = expand
    log.info("paceline mended sampling with drafts on this CPU (vllm-project/vllm issue 55005)")
    return True


__all__ = ["Proposer", "repair_cpu_sampling"]
