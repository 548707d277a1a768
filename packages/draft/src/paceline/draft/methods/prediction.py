"""prediction: copy from a text that the caller expects to resemble the answer (OpenAI's Predicted Outputs).

The text is `SamplingParams.prediction`. The draft follows the longest match in it with the end of the answer; of equal
matches it takes the first after the place of the last draft. Without a match there is no draft."""

from dataclasses import dataclass

import numpy as np

from paceline.core.options import Options, option
from paceline.draft.base import Drafter, DraftTree, IntArray, Request


@dataclass(frozen=True, kw_only=True)
class PredictionConfig(Options):
    draft: int = option(16, "most tokens a draft holds", least=1)
    match: int = option(8, "most tokens of a match; one token is enough", least=1)


class Prediction(Drafter):
    """Copies from the text that the request says its answer will be much like."""

    name = "prediction"
    wants = "a prediction with the request, as --prediction FILE gives"
    lossless = "yes"
    paper = "-"
    Config = PredictionConfig

    def __init__(self, config: PredictionConfig = PredictionConfig()):
        self.config = config
        self._texts: dict[int, tuple[IntArray, int]] = {}  # by row id: prediction, place of the last draft

    def start(self, row: Request) -> None:
        self._texts[row.id] = np.asarray(row.params.prediction, np.int64), 0

    def draft(self, row: Request, most: int) -> DraftTree:
        text, before = self._texts[row.id]
        place = self._after(row.tokens[row.prompt_length :], text, before)
        if place is None:
            return DraftTree.root(row.last_token)
        self._texts[row.id] = text, place
        return self.chain_after(row, text[place : place + min(self.config.draft, most)])

    def _after(self, answer: IntArray, text: IntArray, before: int) -> int | None:
        """The place in the text after the longest match with the end of the answer; None without a match. Of equal
        matches, the first at or after `before` counts, or else the first of all."""
        for length in range(min(self.config.match, len(answer), len(text)), 0, -1):
            windows = np.lib.stride_tricks.sliding_window_view(text, length)
            ends = np.flatnonzero((windows == answer[-length:]).all(1)) + length
            ends = ends[ends < len(text)]
            if len(ends):
                later = ends[ends >= before]
                return int((later if len(later) else ends)[0])
        return None

    def drop(self, row: Request) -> None:
        self._texts.pop(row.id, None)
