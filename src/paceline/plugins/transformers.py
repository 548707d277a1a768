"""Our loop on a transformers model, behind its own `generate`; or a drafter of ours in transformers' loop.

    from paceline.plugins import transformers as paceline

    model.generate(**inputs, max_new_tokens=200, custom_generate=paceline.generate, draft="sam")

    with paceline.candidates(model, "sam"):           # their loop, batch 1
        model.generate(**inputs, prompt_lookup_num_tokens=1)

`generate` takes what transformers has prepared: logits processors, stopping criteria, attention masks with padding on
the left, a GenerationConfig. Greedy answers are those of `model.generate`; sampled ones have its distribution, and
`torch.manual_seed` makes them reproducible. What it cannot honour it refuses by name. transformers drops `streamer=`
for such functions; `stream_to=` is the same thing. Works with transformers 5.16 to 5.23.
"""

from __future__ import annotations

import copy
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from transformers import GenerationConfig
from transformers.generation import (
    CandidateGenerator,
    GenerateDecoderOnlyOutput,
    LogitsProcessorList,
    StoppingCriteria,
)

from paceline.accept import LOSSLESS, Lossless, Walker, follow, sample_from
from paceline.completion import Delta
from paceline.engine import Engine
from paceline.errors import PacelineError
from paceline.plugins.history import History, HostRow, create_paced
from paceline.replay.walk import Recording
from paceline.sampling import SamplingParams
from paceline.schedule import Ragged
from paceline.target.hf import HFTarget
from paceline.tree import IntArray

HANDLED = {"attention_mask", "position_ids", "past_key_values", "use_cache", "logits_to_keep", "cache_position"}
"""Arguments of the model's forward that transformers prepares and our loop makes itself."""
ENTANGLED = ("guidance", "synthid", "noofspeech", "nospeech")
"""Parts of names of logits processors that run the model or remember their calls: a draft would confuse them."""
BATCHED = ("EncoderNoRepeatNGramLogitsProcessor", "PrefixConstrainedLogitsProcessor")
"""Logits processors that count the rows of their batch: they work for one prompt."""
BY_ROW = ("prompt_ignore_length", "encoder_input_ids")
"""Attributes of logits processors that hold a row for each prompt."""
OUTPUTS = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")

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
    **model_kwargs: Any,
) -> Any:
    """For `model.generate(custom_generate=...)`: token ids [B, T + new], padded on the right as transformers does.

    draft      the drafter's spec; it is kept with the model, with what it has learned.
    paced      cut drafts that are copied from text to what pays; else they are as long as the drafter makes them.
    stream_to  a transformers streamer, for one prompt.
    on_round   called with what each round adds to each row: tokens, and how many were drafted.
    Raises PacelineError for what it cannot honour."""
    _refuse(model, input_ids, generation_config, model_kwargs)
    rows = _unpadded(input_ids, model_kwargs)
    if stream_to is not None and len(rows) > 1:
        raise PacelineError(f"a streamer takes one prompt, and there are {len(rows)}")
    was_training = model.training
    engine = engine_of(model, draft, paced)
    # All prompts in one round, for no row is answering yet; a schedule gives half of it to the first of them.
    engine.max_batch, engine.schedule = len(rows), Ragged(len(rows), 2 * sum(map(len, rows)))
    engine.rule = _rule(logits_processor, generation_config, input_ids)
    criteria = [one for one in stopping_criteria if not _is_ours(one)]
    try:
        answers = _answers(engine, rows, input_ids, generation_config, criteria, stream_to, on_round)
    finally:
        engine.rule = LOSSLESS
        model.train(was_training)
    sequences = _padded(input_ids, answers, generation_config)
    if generation_config.return_dict_in_generate:
        return GenerateDecoderOnlyOutput(sequences=sequences)  # type: ignore[arg-type]
    return sequences


def engine_of(model: Any, draft: str, paced: bool = True) -> Engine:
    """The engine that serves this model with this drafter; made once, and gone with the model.

    Raises ModelError for an architecture that cannot forget a rejected draft."""
    engines = _ENGINES.setdefault(model, {})
    if (draft, paced) not in engines:
        target = next((engine.target for engine in engines.values()), None) or HFTarget(
            model, name=getattr(model, "name_or_path", "") or type(model).__name__
        )
        engines[draft, paced] = Engine(target, create_paced(draft, target.vocab_size) if paced else draft)
    return engines[draft, paced]


def forget(model: Any) -> None:
    """Drop the engines of a model: their caches, and what their drafters have learned."""
    _ENGINES.pop(model, None)


# What cannot be honoured ---------------------------------------------------------------------------------------------


def _refuse(model: Any, input_ids: torch.Tensor, config: GenerationConfig, given: dict[str, Any]) -> None:
    """PacelineError, by name, for what would be silently wrong."""
    if model.config.is_encoder_decoder:
        raise PacelineError("custom_generate=paceline.generate takes decoder-only models, and this one has an encoder")
    if input_ids.ndim != 2 or input_ids.shape[1] == 0:
        raise PacelineError("give input_ids; inputs_embeds cannot be drafted from")
    for name in OUTPUTS:
        if getattr(config, name, None):
            raise PacelineError(f"{name} is not kept by paceline.generate; leave it out")
    if (config.num_beams or 1) > 1:
        raise PacelineError("num_beams is above 1; drafts are verified for one beam")
    if config.cache_implementation in ("quantized", "offloaded"):
        raise PacelineError(
            f"cache_implementation={config.cache_implementation!r}: paceline.generate has its own cache"
        )
    cache = given.get("past_key_values")
    if cache is not None and cache.get_seq_length() > 0:
        raise PacelineError("past_key_values holds tokens already; paceline.generate begins with an empty cache")
    if unknown := [name for name, value in given.items() if value is not None and name not in HANDLED]:
        raise PacelineError(f"{', '.join(unknown)} cannot be passed on to the model by paceline.generate")


def _unpadded(input_ids: torch.Tensor, given: dict[str, Any]) -> list[list[int]]:
    """Each row's tokens without the padding on its left; PacelineError for other masks or positions."""
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


class Processed(Lossless):
    """The lossless rule over what transformers' logits processors make of the logits.

    A processor sees the text of one row, padding included, and its logits, and must depend on those alone. processors:
    of each row."""

    def __init__(self, processors: Sequence[Any], padded: Sequence[IntArray], sampling: bool):
        self.processors, self.padded, self.sampling = processors, padded, sampling
        self.first = -1
        """Id of the first row of this call; the others follow."""

    def decide(self, walkers: Sequence[Walker]) -> list[Walker]:
        return [w for w in walkers if self._step(w)]

    def _step(self, walker: Walker) -> bool:
        request = walker.request
        number = request.id - self.first
        prompt, processors = self.padded[number], self.processors[number]
        text = np.concatenate([prompt, walker.context[request.prompt_length :]])
        logits = walker.logits[walker.node].unsqueeze(0).float()
        scores = processors(torch.from_numpy(text).unsqueeze(0).to(logits.device), logits.clone())[0]
        if not self.sampling:
            return follow(walker, int(scores.argmax()))
        return sample_from(walker, scores.softmax(-1))


def _rule(processors: Any, config: GenerationConfig, input_ids: torch.Tensor) -> Lossless:
    """Ours where nothing is processed and nothing is drawn. Raises PacelineError for a processor that a draft would
    confuse."""
    for one in processors:
        name = type(one).__name__
        if any(part in name.lower() for part in ENTANGLED):
            raise PacelineError(f"{name} runs the model or keeps a state of its own, and cannot look at drafts")
        if len(input_ids) > 1 and name in BATCHED:
            raise PacelineError(f"{name} works for one prompt here, and there are {len(input_ids)}")
    if not len(processors) and not config.do_sample:
        return LOSSLESS
    padded = [row.cpu().numpy().astype(np.int64) for row in input_ids]
    return Processed([_of_row(processors, i) for i in range(len(padded))], padded, bool(config.do_sample))


def _of_row(processors: Any, i: int) -> Any:
    """The processors as row i's batch of one has them."""
    own = []
    for one in processors:
        for name in BY_ROW:
            if isinstance(rows := getattr(one, name, None), torch.Tensor) and rows.ndim:
                one = copy.copy(one)
                setattr(one, name, rows[i : i + 1])
        own.append(one)
    return LogitsProcessorList(own)


def _is_ours(criterion: StoppingCriteria) -> bool:
    """Whether a row's own end is this criterion: the length, and end tokens."""
    return type(criterion).__name__ in ("MaxLengthCriteria", "EosTokenCriteria")


# The loop ------------------------------------------------------------------------------------------------------------


def _answers(
    engine: Engine,
    prompts: Sequence[list[int]],
    input_ids: torch.Tensor,
    config: GenerationConfig,
    criteria: Sequence[StoppingCriteria],
    stream_to: Any,
    on_round: Callable[[Delta], None] | None,
) -> list[list[int]]:
    """New tokens of each row."""
    room = config.max_length - input_ids.shape[1]
    most = engine.target.max_context
    if longest := next((len(prompt) for prompt in prompts if len(prompt) + room > most), 0):
        raise PacelineError(f"{longest} tokens and max_new_tokens={room} do not fit the model's context of {most}")
    params = _params(config, room, len(prompts))
    rows = [engine.add(prompt, wish) for prompt, wish in zip(prompts, params, strict=True)]
    if isinstance(engine.rule, Processed):
        engine.rule.first = rows[0].id
    if stream_to is not None:
        stream_to.put(input_ids.cpu())
    ends = _Ends(criteria, input_ids, padded=config._eos_token_tensor is not None)
    try:
        for delta in engine.follow(rows):
            if delta.row.error:
                raise PacelineError(delta.row.error)
            if on_round is not None:
                on_round(delta)
            tokens = ends.take(delta.index, delta.tokens)
            for row in (row for i, row in enumerate(rows) if ends.has_ended(i)):
                engine.abort(row)
            if stream_to is not None and tokens:
                stream_to.put(torch.tensor(tokens))
    finally:
        for row in rows:
            engine.abort(row)
    if stream_to is not None:
        stream_to.end()
    return ends.answers()


class _Ends:
    """Where rows end by the caller's stopping criteria.

    padded  whether a row that has ended is padded while others go on. transformers does so only where there are end
    tokens; without them every row goes on until the last has ended."""

    def __init__(self, criteria: Sequence[StoppingCriteria], input_ids: torch.Tensor, padded: bool):
        self.criteria, self.input_ids = criteria, input_ids
        self.alone = padded or len(input_ids) == 1
        self.tokens: list[list[int]] = [[] for _ in input_ids]
        self.at: dict[int, int] = {}
        """Length of the answer at which a row was told to end."""

    def take(self, i: int, tokens: list[int]) -> list[int]:
        """Add what row i gained in a round; returns what it keeps of that."""
        for n, token in enumerate(tokens, 1):
            self.tokens[i].append(token)
            if i not in self.at and self._holds(i):
                self.at[i] = len(self.tokens[i])
                if self.alone:
                    return tokens[:n]
        return tokens

    def has_ended(self, i: int) -> bool:
        """Whether row i needs no more tokens."""
        if self.alone:
            return i in self.at
        return len(self.at) == len(self.tokens) and len(self.tokens[i]) >= max(self.at.values())

    def answers(self) -> list[list[int]]:
        """The new tokens of every row."""
        together = not self.alone and len(self.at) == len(self.tokens)
        return [of[: max(self.at.values())] if together else of for of in self.tokens]

    def _holds(self, i: int) -> bool:
        if not self.criteria:
            return False
        new = torch.tensor(self.tokens[i], device=self.input_ids.device)
        text = torch.cat([self.input_ids[i], new.to(self.input_ids.dtype)]).unsqueeze(0)
        return any(bool(torch.as_tensor(one(text, None)).any()) for one in self.criteria)


def _params(config: GenerationConfig, room: int, count: int) -> list[SamplingParams]:
    """How each row is answered. Temperature and filters are the processors' work; drafters that draw read them here."""
    ends = config._eos_token_tensor
    sampling: dict[str, Any] = {"temperature": 0.0}
    if config.do_sample:
        sampling = {"temperature": config.temperature or 1.0, "top_k": config.top_k or 0, "top_p": config.top_p or 1.0}
    seeds = torch.randint(1 << 62, (count,)).tolist() if config.do_sample else [None] * count
    stop = () if ends is None else ends.flatten().tolist()
    return [
        SamplingParams(max_tokens=room, stop_token_ids=stop, ignore_eos=True, seed=seed, **sampling) for seed in seeds
    ]


def _padded(input_ids: torch.Tensor, answers: Sequence[list[int]], config: GenerationConfig) -> torch.Tensor:
    """Prompts and answers, [B, T + longest], filled up with the padding token."""
    pad = 0 if config._pad_token_tensor is None else int(config._pad_token_tensor)
    longest = max(map(len, answers))
    filled = [answer + [pad] * (longest - len(answer)) for answer in answers]
    new = torch.tensor(filled, dtype=input_ids.dtype, device=input_ids.device).reshape(len(answers), longest)
    return torch.cat([input_ids, new], -1)


# Their loop ----------------------------------------------------------------------------------------------------------


class Candidates(CandidateGenerator):
    """Drafts for transformers' assisted generation: one prompt, chains, any drafter that reads tokens only.

    limit  length at which the text ends, prompt included."""

    def __init__(self, history: History, limit: int):
        self.history, self.limit = history, limit
        self._row: HostRow | None = None

    def get_candidates(self, input_ids: torch.Tensor, **_: Any) -> Any:
        """The text with its draft; no probabilities, for a draft is certain of itself."""
        text = input_ids[0].cpu().numpy().astype(np.int64)
        if self._row is None:
            self._row = self.history.start(text, self.limit - len(text))
        else:
            self.history.advance([self._row], [text[len(self._row) :]])
        chain = torch.from_numpy(self.history.draft([self._row])[0]).to(input_ids)
        return torch.cat([input_ids, chain.unsqueeze(0)], -1), None

    def update_candidate_strategy(self, input_ids: torch.Tensor, scores: torch.Tensor, num_matches: int) -> None:
        """Nothing to adapt: the drafter sees what was kept."""

    def close(self) -> None:
        """The answer has ended."""
        if self._row is not None:
            self.history.drop(self._row)
            self._row = None


@contextmanager
def candidates(model: Any, draft: str = "sam", *, most: int = 16, paced: bool = True) -> Iterator[None]:
    """Within it, transformers' prompt lookup drafts as `draft` says: pass prompt_lookup_num_tokens (any number).

    most  tokens of a draft; paced: cut drafts to what pays."""
    ends = model.generation_config.eos_token_id
    eos = () if ends is None else tuple(ends) if isinstance(ends, list) else (ends,)
    vocab_size = model.config.get_text_config().vocab_size
    facts = Recording(None, eos, vocab_size, name=getattr(model, "name_or_path", "a model"))
    history = History(draft, facts, most, paced)
    open_ones: list[Candidates] = []

    def seat(self: Any, generation_config: GenerationConfig, **_: Any) -> Candidates:
        while open_ones:  # the call before this one has ended
            open_ones.pop().close()
        open_ones.append(Candidates(history, generation_config.max_length))
        return open_ones[-1]

    model._get_candidate_generator = types.MethodType(seat, model)
    try:
        yield
    finally:
        del model._get_candidate_generator
        for one in open_ones:
            one.close()
