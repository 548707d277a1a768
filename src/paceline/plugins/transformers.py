"""Our loop on a transformers model, called by its own `generate`.

    from paceline.plugins import transformers as paceline

    model.generate(**inputs, max_new_tokens=200, custom_generate=paceline.generate, draft="sam")

`generate` honours transformers' logits processors, stopping criteria, attention masks with padding on the left, and
GenerationConfig; it refuses by name what it cannot honour. Greedy answers are those of `model.generate`; sampled ones
have its distribution, and `torch.manual_seed` makes them reproducible. Works with transformers 5.16 to 5.23."""

from __future__ import annotations

import copy
import functools
import tomllib
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from transformers import GenerationConfig
from transformers.generation import (
    EosTokenCriteria,
    GenerateDecoderOnlyOutput,
    GenerationMixin,
    LogitsProcessorList,
    MaxLengthCriteria,
    StoppingCriteriaList,
)

from paceline.core.accept import LOSSLESS, Cursor, Rule, chosen, follow
from paceline.core.request import Delta
from paceline.core.sampling import SamplingParams
from paceline.core.tree import IntArray
from paceline.engine.engine import Engine
from paceline.engine.scheduler import Ragged
from paceline.errors import PacelineError
from paceline.target.hf import HFTarget

HANDLED = {"attention_mask", "position_ids", "past_key_values", "use_cache", "logits_to_keep", "cache_position"}
"""Arguments of the model's forward that transformers prepares and our loop makes itself."""
ENTANGLED = ("guidance", "synthid", "noofspeech", "nospeech")
"""Parts of names of logits processors that run the model or remember their calls, so that drafts would confuse them."""
BATCHED = ("EncoderNoRepeatNGramLogitsProcessor", "PrefixConstrainedLogitsProcessor")
"""Logits processors that count the rows of their batch: they work for one prompt."""
BY_ROW = ("prompt_ignore_length", "encoder_input_ids")
"""Attributes of logits processors that hold a row for each prompt."""
REFUSED: dict[str, dict[str, Any]] = tomllib.loads(Path(__file__).with_name("refused.toml").read_text("utf-8"))
"""What cannot be honoured, and why: modes of decoding, fields of a GenerationConfig, arguments of `model.generate`."""

_ENGINES: WeakKeyDictionary[Any, dict[tuple[str, bool], Engine]] = WeakKeyDictionary()


def generate(
    model: Any,
    input_ids: torch.Tensor,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: GenerationConfig,
    draft: str = "sam",
    paced: bool = True,
    stream_to: Any = None,
    on_round: Callable[[Delta], None] | None = None,
    streamer: Any = None,
    tokenizer: Any = None,
    **model_kwargs: Any,
) -> Any:
    """For `model.generate(custom_generate=...)`: token ids [B, T + new], padded on the right as transformers does.

    draft      the drafter's spec. The drafter, with what it has learned, lives as long as the model.
    paced      cut drafts that are copied from text to what pays; else they are as long as the drafter makes them.
    stream_to  the same as streamer=, for a function that wraps this one: transformers drops its streamer.
    on_round   called with the delta of each row in each round.
    streamer   a transformers streamer, for one prompt, which transformers has passed to it.
    tokenizer  not used: transformers has prepared stop_strings and token_healing with it.
    Raises PacelineError for what it cannot honour."""
    _refuse(model, input_ids, generation_config, model_kwargs)
    prompts = _unpadded(input_ids, model_kwargs)
    if (stream_to is not None or streamer is not None) and len(prompts) > 1:
        raise PacelineError(f"a streamer takes one prompt, and there are {len(prompts)}")
    was_training = model.training
    engine = engine_of(model, draft, paced)
    rule = _rule(logits_processor, generation_config, input_ids)
    if stream_to is not None:
        stream_to.put(input_ids.cpu())
    ends = _Ends(stopping_criteria, input_ids, generation_config)
    try:
        _answer(engine, prompts, rule, ends, generation_config, stream_to or streamer, on_round)
    finally:
        model.train(was_training)
    if generation_config.return_dict_in_generate:
        return GenerateDecoderOnlyOutput(sequences=ends.sequences())  # type: ignore[arg-type]
    return ends.sequences()


def _hand_over(extract: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """`GenerationMixin._extract_generation_mode_kwargs`, which also passes `generate` the arguments that it drops for
    custom functions: tokenizer (else transformers refuses stop_strings), streamer, assistant_model, synced_gpus."""
    own = ("draft", "paced", "stream_to", "on_round")

    @functools.wraps(extract)
    def extracted(self: Any, custom_generate: Any, kwargs: dict[str, Any], *more: Any) -> dict[str, Any]:
        if getattr(custom_generate, "func", custom_generate) is not generate:
            return extract(self, custom_generate, kwargs, *more)
        if kwargs.get("past_key_values") is not None:
            raise PacelineError("past_key_values: paceline.generate has a cache of its own and would not fill yours")
        given = {name: kwargs.pop(name) for name in own if name in kwargs}
        given |= extract(self, None, kwargs, *more)
        for name, why in REFUSED["arguments"].items():
            if given.pop(name, None):
                raise PacelineError(f"{name} cannot be honoured: {why}")
        return given

    return extracted


GenerationMixin._extract_generation_mode_kwargs = _hand_over(  # type: ignore[method-assign]
    GenerationMixin._extract_generation_mode_kwargs
)


def engine_of(model: Any, draft: str, paced: bool = True) -> Engine:
    """The engine of this model with this drafter; made once, and dropped with the model.

    Raises ModelError for an architecture that cannot forget a rejected draft."""
    engines = _ENGINES.setdefault(model, {})
    if (draft, paced) not in engines:
        target = next((engine.target for engine in engines.values()), None) or HFTarget(
            model, name=getattr(model, "name_or_path", "") or type(model).__name__
        )
        engines[draft, paced] = Engine(target, draft, budget=paced)
    return engines[draft, paced]


def forget(model: Any) -> None:
    """Drop the engines of a model: their caches, and what their drafters have learned."""
    _ENGINES.pop(model, None)


def _refuse(model: Any, input_ids: torch.Tensor, config: GenerationConfig, given: dict[str, Any]) -> None:
    """Raise PacelineError that names an argument that cannot be honoured."""
    if model.config.is_encoder_decoder:
        raise PacelineError("custom_generate=paceline.generate takes decoder-only models, and this one has an encoder")
    if input_ids.ndim != 2 or input_ids.shape[1] == 0:
        raise PacelineError("give input_ids; inputs_embeds cannot be drafted from")
    mode = config.get_generation_mode()
    if mode.value in REFUSED["modes"]:
        field, way = REFUSED["modes"][mode.value]
        raise PacelineError(f"{field} cannot be honoured: drafts are verified greedily or by sampling, not by {way}")
    for name, why in REFUSED["fields"].items():
        if getattr(config, name, None):
            raise PacelineError(f"{name} cannot be honoured: {why}")
    if any(kind in (config.cache_implementation or "") for kind in ("quantized", "offloaded")):
        raise PacelineError(
            f"cache_implementation={config.cache_implementation!r}: paceline.generate has its own cache"
        )
    cache = given.get("past_key_values")
    if cache is not None and cache.get_seq_length() > 0:
        raise PacelineError("past_key_values holds tokens already; paceline.generate begins with an empty cache")
    if unknown := [name for name, value in given.items() if value is not None and name not in HANDLED]:
        raise PacelineError(f"{', '.join(unknown)} cannot be passed on to the model by paceline.generate")


def _unpadded(input_ids: torch.Tensor, given: dict[str, Any]) -> list[list[int]]:
    """Each row's tokens without the padding on the left. Raises PacelineError for other masks or positions."""
    mask, positions = given.get("attention_mask"), given.get("position_ids")
    if mask is None:
        mask = torch.ones_like(input_ids)
    mask = mask.bool()
    if not bool(mask[:, -1].all()) or bool((mask[:, 1:] < mask[:, :-1]).any()):
        raise PacelineError("the attention mask has holes, or pads on the right: pad on the left (padding_side='left')")
    if positions is not None:
        expected = (mask.long().cumsum(-1) - 1).to(positions.device)
        if positions.shape != expected.shape or bool((positions != expected)[mask.to(positions.device)].any()):
            raise PacelineError("position_ids are not those of the attention mask; leave them out")
    return [row[seen].tolist() for row, seen in zip(input_ids, mask.to(input_ids.device), strict=True)]


# Processors and criteria ---------------------------------------------------------------------------------------------


class Processed:
    """The lossless rule on the scores of transformers' logits processors.

    A processor sees the text of one row, padding included, and its logits, and must depend on those alone.

    processors  those of each row.
    padded      each row's prompt with padding, int64.
    sampling    draw tokens; else take the best.
    first       id of the first row; those of the others follow."""

    name, lossless = "lossless", True

    def __init__(self, processors: Sequence[Any], padded: Sequence[IntArray], sampling: bool, first: int):
        self.processors, self.padded, self.sampling, self.first = processors, padded, sampling, first

    def decide(self, cursors: Sequence[Cursor]) -> list[Cursor]:
        return [w for w in cursors if self._step(w)]

    def _step(self, cursor: Cursor) -> bool:
        request = cursor.request
        number = request.id - self.first
        prompt, processors = self.padded[number], self.processors[number]
        text = np.concatenate([prompt, cursor.context[request.prompt_length :]])
        logits = cursor.logits[cursor.node].unsqueeze(0).float()
        scores = processors(torch.from_numpy(text).unsqueeze(0).to(logits.device), logits.clone())
        if scores.shape != logits.shape:
            names = ", ".join(type(one).__name__ for one in processors)
            raise PacelineError(f"the logits processors ({names}) do not work on one row alone, as drafts need it")
        scores = scores[0]
        if not self.sampling:
            return follow(cursor, int(scores.argmax()))
        return follow(cursor, *chosen([cursor], scores.softmax(-1).unsqueeze(0)))


def _rule(processors: Any, config: GenerationConfig, input_ids: torch.Tensor) -> Callable[[int], Rule]:
    """The acceptance rule, as a function of the first row's id; ours if there are no processors and no draws.

    Raises PacelineError for a processor that drafts would confuse."""
    for one in processors:
        name = type(one).__name__
        if any(part in name.lower() for part in ENTANGLED):
            raise PacelineError(f"{name} runs the model or keeps a state of its own, and cannot look at drafts")
        if len(input_ids) > 1 and name in BATCHED:
            raise PacelineError(f"{name} works for one prompt here, and there are {len(input_ids)}")
    if not len(processors) and not config.do_sample:
        return lambda first: LOSSLESS
    padded = [row.cpu().numpy().astype(np.int64) for row in input_ids]
    count = len(padded)
    return partial(Processed, [_of_row(processors, i, count) for i in range(count)], padded, bool(config.do_sample))


def _of_row(processors: Any, i: int, count: int) -> Any:
    """The processors for row i of `count` alone."""
    own = []
    for one in processors:
        for name in BY_ROW:
            if isinstance(rows := getattr(one, name, None), torch.Tensor) and rows.ndim:
                one = copy.copy(one)
                at = i * len(rows) // count  # A prompt has num_return_sequences rows.
                setattr(one, name, rows[at : at + 1])
        own.append(one)
    return LogitsProcessorList(own)


def _answer(
    engine: Engine, prompts: Sequence[list[int]], rule: Callable[[int], Rule], ends: _Ends, config: GenerationConfig,
    streamer: Any, on_round: Callable[[Delta], None] | None,
) -> None:  # fmt: skip
    """Answer the prompts and add the new tokens of each row to `ends`. rule: a function of the first row's id."""
    most = engine.target.max_context
    if longest := next((len(prompt) for prompt in prompts if len(prompt) + ends.most > most), 0):
        raise PacelineError(f"{longest} tokens and max_new_tokens={ends.most} do not fit the model's context of {most}")
    params = _params(config, ends, len(prompts))
    rows = [engine.add(prompt, of_row) for prompt, of_row in zip(prompts, params, strict=True)]
    # All prompts run in one round: the schedule gives half of prefill_chunk to the first prompt.
    schedule = Ragged(len(rows), 2 * sum(map(len, prompts)))
    try:
        with engine.using(rule=rule(rows[0].id), schedule=schedule):
            for delta in engine.follow(rows):
                if delta.row.error:
                    raise PacelineError(delta.row.error)
                if on_round is not None:
                    on_round(delta)
                tokens = ends.take(delta.index, delta.tokens)
                for row in (row for i, row in enumerate(rows) if ends.has_ended(i)):
                    engine.abort(row)
                if streamer is not None and tokens:
                    streamer.put(torch.tensor(tokens))
    finally:
        for row in rows:
            engine.abort(row)
    if streamer is not None:
        streamer.end()


class _Ends:
    """The text of the batch, and where its rows end.

    Criteria other than length and end tokens are called as `generate` calls them: with all rows, after each step of the
    batch. Rows advance by different numbers of tokens, so a step waits until every unfinished row has its token.

    most  most new tokens of a row."""

    def __init__(self, criteria: StoppingCriteriaList, input_ids: torch.Tensor, config: GenerationConfig):
        count, self.prompt = input_ids.shape
        limits = [one.max_length for one in criteria if isinstance(one, MaxLengthCriteria)]
        self.most = max(1, min(limits, default=config.max_length) - self.prompt)
        ends = [one.eos_token_id for one in criteria if isinstance(one, EosTokenCriteria)]
        self.stop = [token for tokens in ends for token in tokens.flatten().tolist()]
        own = {MaxLengthCriteria, EosTokenCriteria}  # The engine itself ends rows by these.
        self.criteria = criteria if any(type(one) not in own for one in criteria) else StoppingCriteriaList()
        # Without end tokens, transformers continues every row until the last has ended.
        self.alone = count == 1 or any(hasattr(one, "eos_token_id") for one in criteria)
        self.pad = 0 if config._pad_token_tensor is None else int(config._pad_token_tensor)
        self.device = input_ids.device  # The device of the sequences and of the text for criteria.
        self.text = input_ids.new_full(
            (count, self.prompt + self.most), self.pad, device=self.device if self.criteria else "cpu"
        )
        self.text[:, : self.prompt] = input_ids
        self.lengths, self.goes_on, self.steps = [0] * count, [True] * count, 0

    def take(self, i: int, tokens: list[int]) -> list[int]:
        """Add the tokens that row i gained in a round; return those that remain, for a streamer of a single row."""
        if self.has_ended(i):  # Another row's token ended it in this round.
            return []
        start = self.lengths[i]
        self.lengths[i] += len(tokens)
        new = torch.tensor(tokens, dtype=self.text.dtype, device=self.text.device)
        self.text[i, self.prompt + start : self.prompt + self.lengths[i]] = new
        if not self.criteria:
            self.steps = max(self.lengths)
        while any(self.goes_on) and all(self.has_ended(i) or n > self.steps for i, n in enumerate(self.lengths)):
            self._step()
        return tokens[: self.steps - start]

    def has_ended(self, i: int) -> bool:
        """Whether row i needs no more tokens."""
        return not self.goes_on[i] if self.alone else not any(self.goes_on)

    def sequences(self) -> torch.Tensor:
        """Prompts and answers, [B, T + longest], padded on the right."""
        return self.text[:, : self.prompt + self.steps].to(self.device, copy=True)

    def _step(self) -> None:
        self.steps += 1
        end = self.prompt + self.steps
        for i, done in enumerate(self.criteria(self.text[:, :end], None).tolist()):
            if done and self.goes_on[i]:
                self.goes_on[i] = False
                if self.alone:
                    self.text[i, end:] = self.pad


def _params(config: GenerationConfig, ends: _Ends, count: int) -> list[SamplingParams]:
    """The parameters of each row. Processors apply temperature and filters; drafters with a model read them here."""
    sampling: dict[str, Any] = {"temperature": 0.0}
    if config.do_sample:
        sampling = {"temperature": config.temperature or 1.0, "top_k": config.top_k or 0, "top_p": config.top_p or 1.0}
    seeds = torch.randint(1 << 62, (count,)).tolist() if config.do_sample else [None] * count
    sampling |= {"max_tokens": ends.most, "stop_token_ids": ends.stop, "ignore_eos": True}
    return [SamplingParams(seed=seed, **sampling) for seed in seeds]
