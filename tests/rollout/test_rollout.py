"""`rollout`: reuse, budgets, ends, keys, randomness and figures, over a policy from a table."""

import logging
import math

import numpy as np
import pytest

from paceline.core.sampling import SamplingParams
from paceline.engine.engine import Engine
from paceline.errors import PacelineError
from paceline.rollout import RolloutStore, rollout
from paceline.rollout.rules import _warn
from paceline.rollout.store import Key, digest
from tests.fakes import TableTarget
from tests.pairs import paired

EOS, VOCAB = 3, 12
PROMPTS = [[1, 2], [4, 5, 6], [7]]
SAMPLED = SamplingParams(temperature=1.0, max_tokens=12)
DRAFT = "past-answer+sam,past=4096"


def policy(seed=0, **kw):
    return TableTarget(VOCAB, order=2, seed=seed, eos=(EOS,), scale=1.5, **kw)


def roll(target, store, version, rule="residual", prompts=PROMPTS, params=SAMPLED, draft=DRAFT, **more):
    options = {"copies": 4, "seed": 5} | more
    engine = Engine(target, draft, max_batch=6)
    return rollout(engine, prompts, store, params=params, rule=rule, version=version, **options)


def tokens(rollouts):
    return [answer.tokens for answer in rollouts.answers]


@pytest.mark.parametrize("rule", ["residual", "plain", "coupled"])
def test_an_unchanged_policy_reuses_everything(rule):
    store, target = RolloutStore(), policy()
    first = roll(target, store, 0, rule)
    forwards = target.forwards
    second = roll(target, store, 1, rule)
    assert (tokens(first), second.figures.decoded) == (tokens(second), 0)
    assert second.figures.full == second.figures.offered == second.figures.answers == 12
    assert second.figures.full_reuse == second.figures.reuse == 1
    assert second.figures.mean_drift < 1e-12
    assert target.forwards - forwards < forwards / 3


def test_lenience_zero_is_fresh_generation_and_infinity_keeps_all():
    store = RolloutStore()
    first = roll(policy(0), store, 0)
    state = store.state_dict()
    nothing = roll(policy(1), store, 1, "plain", lenience=0.0)
    assert (nothing.figures.reused, nothing.figures.offered) == (0, 12)
    store.load_state_dict(state)
    everything = roll(policy(1), store, 1, "plain", lenience=math.inf)
    assert (tokens(everything), everything.figures.decoded) == (tokens(first), 0)


@pytest.mark.parametrize("rule", ["residual", "one-hot", "coupled", "plain"])
def test_prompts_without_an_old_answer_are_generated(rule):
    store = RolloutStore()
    assert roll(policy(), store, 0, rule, copies=2).figures.offered == 0
    later = roll(policy(1), store, 1, rule, prompts=[*PROMPTS, [9, 9]], copies=3)
    assert (later.figures.offered, len(later)) == (6, 12)
    for answer in later.answers:
        assert (answer.old > 0) == (answer.key.copy < 2 and answer.prompt != [9, 9])
        assert answer.old > 0 or answer.reused == 0
    small = RolloutStore(capacity=1)  # everything is evicted at once
    roll(policy(), small, 0, rule)
    assert roll(policy(), small, 1, rule).figures.offered == 0


@pytest.mark.parametrize(
    ("draft", "rule"), paired([DRAFT, "none", "past-answer,draft=2"], ["residual", "one-hot", "coupled", "plain"]),
)
def test_answers_are_a_prefix_of_the_old_one_and_then_new(rule, draft):
    store = RolloutStore()
    first = roll(policy(0, zeros=0.2), store, 0, rule, draft=draft)
    later = roll(policy(1), store, 1, rule, draft=draft)
    for old, new in zip(first.answers, later.answers, strict=True):
        same = next((i for i, (a, b) in enumerate(zip(old.tokens, new.tokens, strict=False)) if a != b), None)
        alike = min(len(old.tokens), len(new.tokens)) if same is None else same
        assert new.reused == alike or (rule == "plain" and new.reused < alike)  # it left, and drew the same token
        assert len(new.tokens) <= SAMPLED.max_tokens
        assert EOS not in new.tokens[:-1]
        assert (new.finished, len(new.logprobs)) == (new.tokens[-1] == EOS, len(new.tokens))
    assert 0 < later.figures.reused < later.figures.tokens


def test_a_rejected_end_lets_the_answer_go_on_and_a_cut_one_stays_cut():
    ends = TableTarget(
        VOCAB, logits=lambda prefix: np.eye(VOCAB)[EOS if len(prefix) == 2 else 5] * 40, order=None, eos=(EOS,)
    )
    goes_on = TableTarget(VOCAB, logits=lambda prefix: np.eye(VOCAB)[5] * 40, order=None, eos=(EOS,))
    store = RolloutStore()
    assert tokens(roll(ends, store, 0, prompts=[[1, 2]], copies=1)) == [[EOS]]
    later = roll(goes_on, store, 1, prompts=[[1, 2]], copies=1)
    assert (tokens(later), later.figures.reused) == ([[5] * 12], 0)
    again = roll(goes_on, store, 2, prompts=[[1, 2]], copies=1)
    assert (tokens(again), again[0].finished, again.figures.full) == ([[5] * 12], False, 1)
    longer = roll(goes_on, store, 3, prompts=[[1, 2]], copies=1, params=SamplingParams(temperature=1.0, max_tokens=14))
    assert (tokens(longer), longer[0].reused) == ([[5] * 14], 12)
    shorter = roll(goes_on, store, 4, prompts=[[1, 2]], copies=1, params=SamplingParams(temperature=1.0, max_tokens=3))
    assert (tokens(shorter), shorter[0].reused) == ([[5] * 3], 3)


def test_the_last_place_of_the_budget_is_verified_too():
    """Its token can be rejected, and is then the last one drawn."""

    def after(prefix, last):
        return np.eye(VOCAB)[last if len(prefix) == 2 + 3 else 5] * 40

    one = TableTarget(VOCAB, logits=lambda prefix: after(prefix, 6), order=None)
    other = TableTarget(VOCAB, logits=lambda prefix: after(prefix, 7), order=None)
    store, four = RolloutStore(), SamplingParams(temperature=1.0, max_tokens=4)
    assert tokens(roll(one, store, 0, prompts=[[1, 2]], copies=1, params=four)) == [[5, 5, 5, 6]]
    later = roll(other, store, 1, prompts=[[1, 2]], copies=1, params=four)
    assert (tokens(later), later[0].reused, later.figures.decoded) == ([[5, 5, 5, 7]], 3, 1)


def test_token_ids_beyond_the_tokenizer_and_other_vocabularies():
    """The model's ids count, not the tokenizer's; an entry of a larger model is not offered."""
    store = RolloutStore()
    roll(policy(), store, 0)
    assert any(max(answer) >= 8 for answer in tokens(roll(policy(), store, 1)))
    small = TableTarget(8, order=2, eos=(EOS,))
    assert roll(small, store, 2, prompts=[[1, 2], [4, 5, 6]]).figures.offered < 8


def test_noise_is_fresh_in_every_epoch_and_the_same_in_any_order_and_batch():
    first = roll(policy(), RolloutStore(), 0, "one-hot")
    assert tokens(roll(policy(), RolloutStore(), 0, "one-hot")) == tokens(first)
    assert tokens(roll(policy(), RolloutStore(), 0, "one-hot", seed=6)) != tokens(first)
    backwards = roll(policy(), RolloutStore(), 0, "one-hot", prompts=PROMPTS[::-1])
    assert tokens(backwards)[8:] == tokens(first)[:4]
    store = RolloutStore()
    epochs = [tokens(roll(policy(), store, 0, "one-hot")) for _ in range(3)]  # the same version: visits alone count
    assert epochs[0] != epochs[1] != epochs[2]
    visits = {store.get(Key(digest(PROMPTS[0]), copy)).visit for copy in range(4)}
    assert visits == {2}


def test_a_resumed_store_goes_on_with_the_noise(tmp_path_factory):
    whole, file = RolloutStore(), tmp_path_factory.mktemp("store") / "answers"
    for version in range(2):
        roll(policy(version), whole, version)
        roll(policy(version), RolloutStore(file), version)
    assert tokens(roll(policy(2), whole, 2)) == tokens(roll(policy(2), RolloutStore(file), 2))


@pytest.mark.parametrize("rule", ["residual", "plain"])
def test_another_distribution_is_refused_where_old_probabilities_count(rule):
    store = RolloutStore()
    roll(policy(), store, 0, rule, params=SamplingParams(temperature=1.0, top_p=0.9, max_tokens=12))
    with pytest.raises(PacelineError, match=r"top_p=0\.9 and are to be verified with top_p=1\.0.*or use one-hot"):
        roll(policy(), store, 1, rule)
    assert roll(policy(), store, 1, "one-hot").figures.offered == 12


def test_filters_are_those_of_sampling():
    """p and q of a nucleus: an unchanged policy still keeps everything, and no token outside is ever there."""
    params = SamplingParams(temperature=0.7, top_k=3, max_tokens=12)
    store = RolloutStore()
    roll(policy(), store, 0, params=params)
    second = roll(policy(), store, 1, params=params)
    assert second.figures.decoded == 0
    later = roll(policy(1), store, 2, params=params)
    assert all(np.exp(answer.logprobs).min() > 0 for answer in later.answers)


def test_greedy_rollouts_are_refused():
    with pytest.raises(PacelineError, match="temperature is 0"):
        roll(policy(), RolloutStore(), 0, params=SamplingParams(max_tokens=4))
    with pytest.raises(PacelineError, match="copies is 0"):
        roll(policy(), RolloutStore(), 0, copies=0)


def test_duplicates_and_reshuffled_epochs_keep_their_own_answers():
    store = RolloutStore()
    first = roll(policy(), store, 0, prompts=[[1, 2], [4], [1, 2]], copies=2)
    assert [answer.key.copy for answer in first.answers] == [0, 1, 0, 1, 2, 3]
    later = roll(policy(), store, 1, prompts=[[4], [1, 2], [1, 2]], copies=2)
    assert tokens(later) == [tokens(first)[i] for i in (2, 3, 0, 1, 4, 5)]


def test_an_engine_answers_other_requests_as_before():
    """Afterwards the engine's own rule is back, and a request of another kind beside a rollout is decided by it."""
    target = policy()
    engine = Engine(target, DRAFT)
    rule, store = engine.rule, RolloutStore()
    other = engine.add([1, 2], SamplingParams(temperature=0.0, max_tokens=6))
    rollout(engine, PROMPTS, store, copies=2, params=SAMPLED)
    engine.finish([other])
    assert engine.rule is rule
    expected = target.plain([1, 2], SamplingParams(max_tokens=6))
    assert other.new_tokens.tolist() == expected.new_tokens.tolist()


def test_an_interrupted_call_leaves_the_store_and_the_engine_as_they_were():
    store, engine = RolloutStore(), Engine(policy(), DRAFT)

    def interrupt(_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        rollout(engine, PROMPTS, store, copies=2, params=SAMPLED, progress=interrupt)
    assert len(store) == 0
    assert not engine.has_work
    assert len(rollout(engine, PROMPTS, store, copies=2, params=SAMPLED)) == 6


@pytest.mark.parametrize("rule", ["residual", "one-hot", "coupled", "plain"])
def test_logprobs_are_the_new_policys_and_so_is_what_is_stored(rule):
    store = RolloutStore()
    roll(policy(), store, 0, rule)
    target = policy(1)
    for answer in roll(target, store, 1, rule).answers:
        fresh = [
            math.log(float(target.probabilities_after([*answer.prompt, *answer.tokens[:i]], SAMPLED)[token]))
            for i, token in enumerate(answer.tokens)
        ]
        np.testing.assert_allclose(answer.logprobs, fresh, rtol=1e-9)
        entry = store.get(answer.key)
        assert entry.tokens.tolist() == answer.tokens
        np.testing.assert_allclose(entry.logprobs, fresh, rtol=1e-9)


@pytest.mark.parametrize("rule", ["residual", "one-hot", "coupled", "plain", "vanilla"])
def test_decoded_and_reused_tokens_are_all_tokens(rule):
    store = RolloutStore()
    first = roll(policy(), store, 0, rule).figures
    assert (first.reused, first.decoded) == (0, first.tokens)
    later = roll(policy(1), store, 1, rule)
    of = later.figures
    assert of.tokens == sum(len(answer.tokens) for answer in later.answers)
    assert (of.reused, of.decoded + of.reused) == (sum(answer.reused for answer in later.answers), of.tokens)
    assert of.old_tokens == (0 if rule == "vanilla" else first.tokens)
    assert of.seconds > 0


def test_the_published_rule_says_that_it_is_not_lossless(caplog):
    _warn.cache_clear()
    with caplog.at_level(logging.WARNING):
        rollouts = roll(policy(), RolloutStore(), 0, "plain")
    assert "not lossless" in caplog.text
    assert "not lossless" in rollouts.rule
    assert not rollouts.lossless
    assert all(roll(policy(), RolloutStore(), 0, rule).lossless for rule in ("residual", "one-hot", "coupled"))


def test_a_drafter_that_does_not_propose_old_answers_is_named(caplog):
    store = RolloutStore()
    roll(policy(), store, 0, draft="none")
    roll(policy(), store, 1, draft="none")
    assert "verified token by token" in caplog.text
