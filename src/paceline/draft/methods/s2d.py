"""s2d: a draft model that each token leaves at the first exit that is sure enough (Sorted Speculative Decoding).

Kavehzadeh et al. 2024 (arXiv 2407.01955); SD2, its revision of 2025, adds the tree. The draft model is the first layers
of a model, trained so that the final norm and the head also fit after earlier layers (SoFT, arXiv 2309.08968;
`train/s2d.py`). It needs only the target's tokenizer, so one draft model serves many targets.

    run the layers up to exit k -> is the best token's probability above threshold k? -> draft from here, or go deeper

Layers that a token did not reach lack its keys and values. Its state waits before them, and runs with the first later
token that reaches them. So a token's exit changes the cost of later tokens, never their distribution.

Where we differ from the published method and why: docs/methods/s2d.md."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch

from paceline.core.options import option
from paceline.core.segment import Segment
from paceline.draft.methods.model import ModelConfig, load_network, own_tokenizer, trim
from paceline.draft.models import stop
from paceline.draft.models.draft_model import Draft, TextModel
from paceline.draft.models.model_drafter import ModelDrafter
from paceline.errors import MethodError
from paceline.formats.facts import Facts, Inside
from paceline.formats.heads.checkpoint import read_drafter
from paceline.target.load import SMALL_FILES, find

LAG = 64
"""Largest number of committed tokens that may wait before deeper layers when a round begins."""
SURE = 0.5
"""Threshold if neither the options nor the checkpoint have one; the paper's."""
NEVER = 1.01
"""Largest threshold: no probability is above it."""


@dataclass(frozen=True, kw_only=True)
class SortedConfig(ModelConfig):
    stop: stop.Name = option("svip", "when to stop; paper: `heuristic`, 5 tokens, then 2 more or 1 less a round")
    exits: str | None = option(None, "layers after which a token may leave, as in 2,4,8; none: the trained ones")
    thresholds: str | None = option(
        None,
        "how probable the best token of an exit must be to be drafted there: one for each exit but the last, as in "
        "0.5,0.7, or one for all; none: what training found best for its target, or 0.5; paper: 0.5, and 0.75,0.7 "
        "for 70B",
    )


class Section:
    """Layers `first` to `last` - 1 of the draft model, up to an exit, with their own cache.

    Nodes are numbered from the end of this cache: the committed tokens that have not run here, then the draft's nodes.

    threshold    threshold of the exit.
    deeper       the next section; None after the last exit.
    nbytes       bytes of weights that these layers and their exit read.
    ran          by slot: number of nodes run since the last commit.
    waiting      by slot: states [n, H], before layer `first`, of the next nodes to run.
    exits_taken  how often a draft left here."""

    def __init__(self, model: Inside, first: int, last: int, threshold: float):
        self.first, self.last, self.threshold = first, last, threshold
        self.deeper: Section | None = None
        layers = [layer.nbytes for layer in model.layers]
        self.nbytes = model.weight_bytes - sum(layers) + sum(layers[first:last])
        self.cache = model.new_cache(last - first, first)
        self.nothing = model.norm.new_empty(0, model.hidden_size)
        self.ran: dict[int, int] = {}
        self.waiting: dict[int, torch.Tensor] = {}
        self.exits_taken = 0

    def start(self, slot: int) -> None:
        """Begin anew: no nodes run since the last commit, and none waiting."""
        self.ran[slot], self.waiting[slot] = 0, self.nothing

    def segment(self, whole: Segment, lag: int) -> Segment:
        """Make a segment of the nodes of `whole`, the first section's segment, that have not been run here.

        lag  how many of the row's tokens are in the first section's cache but not in this one. Their states are known,
             so their ids are not needed."""
        slot, hidden = whole.slot, self.waiting[whole.slot] if self.first else None
        tokens = np.concatenate([np.zeros(lag, np.int64), whole.tokens])
        parent = np.concatenate([np.arange(-1, lag - 1), whole.parent + lag])
        return Segment(slot, tokens, parent, start=self.ran[slot], hidden=hidden)

    def commit(self, slot: int, end: int, nodes: Sequence[int]) -> None:
        """Commit the draft's `nodes` that were run here; the others still wait.

        end  length of the first section's cache before its commit."""
        lag, ran, waiting = end - self.cache.length(slot), self.ran[slot], self.waiting[slot]
        path = [*range(lag), *(lag + node for node in nodes)]
        self.cache.commit(slot, [node for node in path if node < ran])
        self.start(slot)
        if len(waiting):
            self.waiting[slot] = waiting[[node - ran for node in path if ran <= node < ran + len(waiting)]]


class SortedNetwork:
    """A model that each token leaves at the first exit that is sure enough. It keeps rows as a target does.

    sections    its layers, cut at its exits.
    num_tokens  number of the target's tokens; the model's head may have more rows, for padding."""

    def __init__(self, decoder: Inside, exits: Sequence[tuple[int, float]], num_tokens: int):
        self.decoder, self.num_tokens = decoder, num_tokens
        self.max_context, self.vocab_size, self.recurrent = decoder.max_context, decoder.vocab_size, decoder.recurrent
        lasts = [last for last, _ in exits]
        self.sections = [Section(decoder, first, *exit) for first, exit in zip([0, *lasts], exits, strict=False)]
        for section, deeper in pairwise(self.sections):
            section.deeper = deeper
        self.weight_bytes = decoder.weight_bytes - sum(layer.nbytes for layer in decoder.layers[lasts[-1] :])

    def add_row(self, expected_length: int) -> int:
        with ExitStack() as undo:  # If a cache has no memory, the others drop the row again.
            slots = set()
            for section in self.sections:
                slots.add(slot := section.cache.add_row(expected_length))
                undo.callback(section.cache.drop_row, slot)
            undo.pop_all()
        assert len(slots) == 1, "rows come and go in all sections alike"
        for section in self.sections:
            section.start(slot)
        return slot

    def drop_row(self, slot: int) -> None:
        for section in self.sections:
            section.cache.drop_row(slot)

    def length(self, slot: int) -> int:
        """Number of the row's tokens in the first section's cache; deeper sections may have fewer."""
        return self.sections[0].cache.length(slot)

    def commit(self, slot: int, nodes: Sequence[int]) -> None:
        end = self.length(slot)
        for section in self.sections:
            section.commit(slot, end, nodes)

    def run(self, drafts: Sequence[Draft], segments: Sequence[Segment]) -> torch.Tensor:
        """Run each draft's segment up to the first exit that is sure enough. Returns the wanted logits.

        A segment that wants no logits, such as a piece of a prompt, goes through all layers."""
        logits: dict[int, torch.Tensor] = {}
        going = list(range(len(drafts)))
        for section in self.sections:
            states = self._through(section, [segments[i] for i in going])
            wanted = {
                i: of_draft[len(of_draft) - count :]
                for i, of_draft in zip(going, states, strict=True)
                if (count := segments[i].num_logits) and not self._must_go_on(section, drafts[i], segments[i].slot)
            }
            for i, of_draft in self._leave(section, drafts, wanted).items():
                logits[i] = of_draft
                section.exits_taken += 1
            going = [i for i in going if i not in logits]
            if not going:
                break
        return torch.cat([logits[i] for i in sorted(logits)]) if logits else self.sections[0].nothing

    def _through(self, section: Section, segments: Sequence[Segment]) -> list[torch.Tensor]:
        """Run a section over the nodes that wait for it. Returns each row's new states [n, H], which now wait for the
        next section."""
        slots = [segment.slot for segment in segments]
        segments = [section.segment(one, self.length(one.slot) - section.cache.length(one.slot)) for one in segments]
        hidden = self.decoder.run_layers(segments, section.last, first=section.first, cache=section.cache)
        states = list(hidden.split([segment.num_run for segment in segments]))
        for slot, segment, new in zip(slots, segments, states, strict=True):
            section.ran[slot], section.waiting[slot] = len(segment.tokens), section.nothing
            if section.deeper is not None:
                section.deeper.waiting[slot] = torch.cat([section.deeper.waiting[slot], new])
        return states

    def _must_go_on(self, section: Section, draft: Draft, slot: int) -> bool:
        """Whether so many of the row's committed tokens wait for the next section that they must run now."""
        deeper = section.deeper
        if deeper is None or deeper.ran[slot]:
            return False
        return self.length(slot) + draft.num_committed - deeper.cache.length(slot) > LAG

    def _leave(
        self, section: Section, drafts: Sequence[Draft], wanted: Mapping[int, torch.Tensor]
    ) -> dict[int, torch.Tensor]:
        """Logits [n, K] of the drafts that leave after `section`, by draft. wanted: states [n, H] by draft.

        A draft leaves if any of its n distributions, at the request's temperature, has a token above the threshold. A
        chain has one distribution, a tree those of a level (SD2)."""
        if not wanted:
            return {}
        counts = [len(states) for states in wanted.values()]
        logits = self.decoder.logits(torch.cat(list(wanted.values())))[:, : self.num_tokens]
        by_draft = dict(zip(wanted, logits.split(counts), strict=True))
        if section.deeper is None:
            return by_draft
        temperatures = [drafts[i].row.params.temperature or 1.0 for i in wanted for _ in range(len(wanted[i]))]
        scores = logits.float() / torch.tensor(temperatures, device=logits.device)[:, None]
        best = (scores.amax(-1) - scores.logsumexp(-1)).exp().split(counts)
        sure = [bool((of_draft > section.threshold).any()) for of_draft in best]
        return {i: of_draft for (i, of_draft), leaves in zip(by_draft.items(), sure, strict=True) if leaves}


class Sorted(ModelDrafter):
    """Drafts with a model that each token leaves at the first exit that is sure enough.

    sections  the model's layers, cut at its exits."""

    name = "s2d"
    paper = "Kavehzadeh et al. 2024, S2D, arXiv 2407.01955"
    Config = SortedConfig
    config: SortedConfig
    network: SortedNetwork

    def __init__(self, config: SortedConfig):
        super().__init__(config)
        self.exits: list[int] = _numbers("exits", config.exits, int, "2,4,8")
        self.thresholds = _possible(_numbers("thresholds", config.thresholds, float, "0.5,0.7"))

    def open(self, target: Facts) -> TextModel:
        """Load the draft model. MethodError if its tokenizer is not the target's, or it lacks the exits."""
        path = self.config.checkpoint
        exits, thresholds = (self.exits, []) if self.exits else _trained(path)
        own_tokenizer(self.config, target)
        decoder = load_network(self.config, target)
        columns = trim(decoder, self.config, target)
        if decoder.inside is None:
            raise MethodError(f"{path} does not run in the native decoder, and no other model can be left half-way")
        used = exits_in_use(exits, self.thresholds or thresholds or [SURE], decoder.num_layers)
        network = self.network = SortedNetwork(decoder.inside, used, target.vocab_size)
        self.sections = network.sections
        return TextModel(network, target.vocab_size, columns, run=network.run, context=self.config.context)

    @property
    def mean_bytes(self) -> float:
        """Mean bytes of weights that a drafted token reads up to its exit, with the heads of exits that it passed."""
        taken, until = [s.exits_taken for s in self.sections], accumulate(s.nbytes for s in self.sections)
        total = sum(count * nbytes for count, nbytes in zip(taken, until, strict=True))
        return total / sum(taken) if any(taken) else self.weight_bytes


def exits_in_use(exits: Sequence[int], thresholds: Sequence[float], num_layers: int) -> list[tuple[int, float]]:
    """(layers, threshold) of each exit at which tokens can leave; the last exit's threshold is 0 or less.

    thresholds: one for all exits, or one for each exit but the last. MethodError if they do not fit the exits."""
    if any(low >= high for low, high in pairwise([0, *exits])) or exits[-1] > num_layers:
        raise MethodError(f"exits are {_listed(exits)}; they are layers from 1 to {num_layers}, each above the last")
    if len(thresholds) not in (1, len(exits) - 1):
        given = f"thresholds are {_listed(thresholds)} and exits {_listed(exits)}"
        raise MethodError(f"{given}; give one for all, or one for each exit but the last")
    each = [*(thresholds if len(thresholds) > 1 else [*thresholds] * (len(exits) - 1)), 0.0]
    used = [(exit, threshold) for exit, threshold in zip(exits, each, strict=True) if threshold < 1]
    always = next(n for n, (_, threshold) in enumerate(used, 1) if threshold <= 0)
    return used[:always]


def _trained(path: str) -> tuple[list[int], list[float]]:
    """Read the exits, and the thresholds if any, of a draft model of `train s2d`. MethodError for other models."""
    folder = find(path, SMALL_FILES)
    noted = read_drafter(folder, Sorted.name)
    exits, thresholds = noted.get("exits"), noted.get("thresholds") or []
    if not isinstance(exits, list) or not exits or not all(isinstance(exit, int) for exit in exits):
        raise MethodError(f"{folder / 'config.json'} does not say after which layers it has exits: train it again")
    if not isinstance(thresholds, list) or not all(isinstance(number, int | float) for number in thresholds):
        raise MethodError(f"{folder / 'config.json'} has thresholds that are not numbers: train it again")
    return exits, _possible(thresholds)


def _possible(thresholds: list[float]) -> list[float]:
    if wrong := [t for t in thresholds if not 0 <= t <= NEVER]:
        raise MethodError(f"a threshold is {wrong[0]:g}; it is between 0 (always leave) and {NEVER:g} (never)")
    return thresholds


def _numbers(what: str, text: str | None, kind: Callable[[str], Any], example: str) -> list[Any]:
    """Parse numbers with commas between them; None is no number. MethodError names the option `what`."""
    try:
        return [] if text is None else [kind(number) for number in text.split(",")]
    except ValueError:
        raise MethodError(f"{what} is {text!r}; it must be numbers with commas between, as in {example}") from None


def _listed(numbers: Sequence[float]) -> str:
    return ",".join(f"{number:g}" for number in numbers)
