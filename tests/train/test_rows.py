"""Rows of tokens: labels, and mixtures that resume."""

import json

import numpy as np
import pytest
import torch

from paceline.train.data import Mixture, MixtureConfig, lay_end_to_end


def test_end_to_end_labels_are_the_next_token() -> None:
    ids, labels = lay_end_to_end([(list(range(10)), [True] * 10), ([7, 8, 9], [True] * 3)], 4)
    assert ids.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 7, 8]]
    assert labels.tolist() == [[1, 2, 3, 4], [5, 6, 7, 8], [9, 7, 8, 9]]


def mixture(seed: int = 0) -> Mixture:
    rows = {n: (np.full((c, 2), v), np.full((c, 2), v)) for n, c, v in (("a", 5, 1), ("b", 3, 2), ("c", 4, 3))}
    config = MixtureConfig(
        length=2, rows=8, weights={"a": 3, "b": 1}, decay_weights={"b": 1}, other=0.0, decay_from=0.5, seed=seed
    )
    return Mixture(rows, config)


def test_text_nobody_named_weighs_a_quarter() -> None:
    rows = {n: (np.full((9, 2), v), np.full((9, 2), v)) for n, v in (("a", 1), ("text/a", 2))}
    mix = Mixture(rows, MixtureConfig(length=2, rows=100, weights={}, decay_weights={}))
    drawn = torch.cat([mix.next(0.0)["input_ids"] for _ in range(50)])[:, 0]
    assert (drawn == 2).float().mean().item() == pytest.approx(0.2, abs=0.03)


def test_mixture_follows_its_weights_and_resumes() -> None:
    one = mixture()
    early = torch.cat([one.next(0.1)["input_ids"] for _ in range(100)])[:, 0]
    assert 0.68 < (early == 1).float().mean() < 0.82
    assert not (early == 3).any()
    assert (one.next(0.9)["input_ids"] == 2).all()
    two = mixture()
    two.load_state_dict(json.loads(json.dumps(one.state_dict())))
    assert torch.equal(one.next(0.1)["input_ids"], two.next(0.1)["input_ids"])


def test_rows_are_cut_short_until_the_decay() -> None:
    config = MixtureConfig(length=8, rows=2, weights={"a": 1}, decay_weights={"a": 1}, short=4, decay_from=0.5)
    ids = np.arange(80).reshape(10, 8)
    mixture = Mixture({"a": (ids, ids + 1)}, config)
    early, late = mixture.next(0.0), mixture.next(0.6)
    assert (early["input_ids"].shape, late["input_ids"].shape) == ((4, 4), (2, 8))
    assert torch.equal(early["labels"], early["input_ids"] + 1)
