"""The vLLM plug-in without vLLM: rows that move, are reused, end; failures; options.

tests/plugins/test_vllm_slow.py has vLLM itself."""

from types import SimpleNamespace

import numpy as np
import pytest

from paceline.draft.methods.sam import Sam
from paceline.errors import MethodError
from paceline.plugins import vllm
from paceline.plugins.vllm import Proposer

LIMIT, VOCAB = 64, 50


def config(**additional):
    model = SimpleNamespace(
        max_model_len=LIMIT,
        hf_config=SimpleNamespace(get_text_config=lambda: SimpleNamespace(eos_token_id=2)),
        tokenizer="nowhere",
        model="tiny",
        get_vocab_size=lambda: VOCAB,
    )
    speculative = SimpleNamespace(num_speculative_tokens=4)
    return SimpleNamespace(
        model_config=model, speculative_config=speculative,
        additional_config={"paceline": {"repair": False, "paced": False, **additional}},
    )


def verified(text, draft):
    """What vLLM adds to a text that follows a rule: the beginning of a draft that does, and one token more."""
    new = []
    for guess in [*draft, -1]:
        so_far = [*text, *new]
        new.append(so_far[-3] if len(so_far) % 11 else (so_far[-1] + 3) % VOCAB)
        if new[-1] != guess:
            break
    return new


class Host:
    """vLLM's side: texts that follow a rule, verified as vLLM does it, in rows that move."""

    def __init__(self, proposer):
        self.proposer, self.tokens = proposer, np.full((6, LIMIT), 7, np.int32)
        self.rows = []
        self.drafts = []
        self.accepted = self.drafted = 0

    def join(self, prompt):
        self.rows.append(prompt)
        self.drafts.append([])

    def leave(self, place):
        """As vLLM compacts: the last row takes the place."""
        self.rows[place], self.drafts[place] = self.rows[-1], self.drafts[-1]
        self.rows.pop(), self.drafts.pop()

    def step(self, silent=()):
        sampled = []
        for i, row in enumerate(self.rows):
            new = [] if i in silent else verified(row, self.drafts[i])
            self.accepted += max(len(new) - 1, 0)
            self.drafted += len(self.drafts[i]) * (i not in silent)
            row += new
            sampled.append(new)
        lengths = np.full(6, 3, np.int32)
        for i, row in enumerate(self.rows):
            lengths[i] = len(row)
            self.tokens[i, : len(row)] = row
        self.drafts = self.proposer.propose(sampled, lengths, self.tokens, slot_mappings={})
        assert len(self.drafts) == len(self.rows)
        for row, draft in zip(self.rows, self.drafts, strict=True):
            assert len(draft) <= 4
            assert len(row) + len(draft) < LIMIT
            assert all(0 <= token < VOCAB for token in draft)


def test_rows_are_recognised_where_they_move_and_new_ones_are_not_mistaken():
    proposer = vllm.sam(config())
    assert isinstance(proposer, Proposer)
    host = Host(proposer)
    for n in range(4):
        host.join([n, 20 + n, 30 + n, n, 20 + n])
    for _ in range(3):
        host.step()
    ids = [proposer.rows[i].id for i in range(4)]
    host.leave(0)
    host.step()
    assert [proposer.rows[i].id for i in range(3)] == [ids[3], ids[1], ids[2]]
    host.join([1, 2, 3, 1, 2])
    host.step(silent=(1,))
    host.step()
    assert [proposer.rows[i].id for i in range(4)] == [ids[3], ids[1], ids[2], 4]
    while max(map(len, host.rows)) < LIMIT - 5:
        host.step()
    assert host.accepted > 0.5 * host.drafted > 5
    for i, row in proposer.rows.items():
        assert row.tokens.tolist() == host.rows[i]
    host.rows, host.drafts = [], []
    proposer.propose([], np.zeros(6, np.int32), host.tokens)
    assert not proposer.rows
    assert not proposer.history.drafter.parts[0]._automata


def test_drafters_have_names_and_options():
    assert vllm.sam__prompt_lookup(config()).spec == "sam+prompt-lookup"
    assert Proposer(config(draft="sam,draft=3")).most == 4
    given = config(draft="sam")
    del given.additional_config["paceline"]["paced"]
    assert Proposer(given).paced
    given.parallel_config = SimpleNamespace(world_size=2)
    assert not Proposer(given).paced, "clocks differ from process to process"
    for wrong, words in (
        (lambda: Proposer(config()), "Which drafter"), (lambda: Proposer(config(drafter="sam")), "has 'drafter'"),
        (lambda: Proposer(config(draft=3)), "is 3"), (lambda: vllm.samm(config()), "no drafter 'samm'"),
        (lambda: vllm.recycling(config()), "asks the target for"),
    ):
        with pytest.raises(MethodError, match=words):
            wrong()


def test_a_failing_drafter_never_ends_the_engine(monkeypatch):
    proposer = Proposer(config(draft="sam"))
    host = Host(proposer)
    host.join([1, 2, 3, 1, 2])
    host.step()
    good, failing = Sam.draft, True

    def bad(self, row, most):
        if failing and row.tokens[0] == 1:  # a request, and not the trial of a new drafter
            raise RuntimeError("broken")
        return good(self, row, most)

    monkeypatch.setattr(Sam, "draft", bad)
    host.step()
    assert host.drafts == [[]]
    failing = False
    host.step()
    assert host.drafts[0], "it begins again with a new drafter"
    failing = True
    for _ in range(3):
        host.step()
        assert host.drafts == [[]]
    assert proposer.failures == vllm.FAILURES
    failing = False
    host.step()
    assert host.drafts == [[]], "it is left out"

