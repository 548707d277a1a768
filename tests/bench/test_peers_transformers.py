"""transformers as a peer, beside our engine on a tiny model."""

import warnings
from time import perf_counter

import pytest
import torch
from safetensors.torch import save_file
from tests import gguf_files, models
from tests.bench.peers import NEW, PROMPTS, answers, asked, check, opened, peer

from paceline.errors import ModelError, PacelineError, PromptError
from paceline.peers import setup
from paceline.peers import transformers as ours

ALONE = ["transformers-lookup", "transformers-assisted:{draft}"]


@pytest.mark.parametrize("spec", ["transformers", *ALONE])
def test_transformers_says_what_our_engine_says(spec, tiny, draft):
    expected = answers(tiny)
    with opened(spec.format(draft=draft), tiny) as one:
        turns = [asked(one, [prompt], max_tokens=NEW)[0] for prompt in PROMPTS]
        assert one.name == "peer:" + spec.format(draft=draft)
    assert [turn.tokens for turn in turns] == expected
    assert [turn.prompt_tokens for turn in turns] == [len(prompt) for prompt in PROMPTS]
    assert {turn.finish_reason for turn in turns} == {"length"}
    for turn in turns:
        check(turn)
    rounds = sum(len(turn.lengths or []) for turn in turns)
    drafted = sum(sum(turn.nodes or []) for turn in turns)
    if spec == "transformers":
        assert (rounds, drafted) == (NEW * len(PROMPTS), 0)
    else:
        assert rounds < NEW * len(PROMPTS)  # some draft was accepted, so the rounds above were worth a check
        assert drafted >= NEW * len(PROMPTS) - rounds
    calls = sum(turn.calls for turn in turns)
    assert calls == (drafted if "assisted" in spec else 0)


def test_a_batch_is_answered_as_its_prompts_are_alone(tiny):
    expected = answers(tiny)
    ends = (expected[1][5],)
    expected = answers(tiny, ends=ends)
    assert len({len(tokens) for tokens in expected}) > 1  # one ends sooner
    with opened("transformers", tiny) as one:
        turns = asked(one, PROMPTS, max_tokens=NEW, ends=ends)
    assert ([turn.tokens for turn in turns], len({turn.seconds for turn in turns})) == (expected, 1)
    for turn in turns:
        check(turn)
        assert (turn.lengths, turn.nodes) == ([1] * len(turn.tokens), [0] * len(turn.tokens))


@pytest.mark.parametrize("spec", ["transformers", *ALONE])
def test_answers_end_where_they_should(spec, tiny, draft):
    whole = answers(tiny)[0]
    ends = (whole[9],)
    until = whole.index(ends[0]) + 1
    with opened(spec.format(draft=draft), tiny) as one:
        for new in (1, 2, 7):
            (turn,) = asked(one, PROMPTS[:1], max_tokens=new)
            assert (turn.tokens, turn.finish_reason) == (whole[:new], "length")
            check(turn)
        (turn,) = asked(one, PROMPTS[:1], max_tokens=NEW, ends=ends)
        assert (turn.tokens, turn.finish_reason) == (whole[:until], "stop")
        check(turn)


def test_the_context_ends_an_answer(tiny):
    with opened("transformers-lookup", tiny, max_context=12) as one:
        (turn,) = asked(one, PROMPTS[:1], max_tokens=50)
        assert (len(turn.tokens), turn.finish_reason) == (4, "context")
        with pytest.raises(PromptError, match="has 12 tokens"):
            asked(one, [[3] * 12], max_tokens=50)


@pytest.mark.parametrize("spec", ["transformers", *ALONE])
def test_sampling_hangs_on_the_seed(spec, tiny, draft):
    with opened(spec.format(draft=draft), tiny) as one:
        how = {"max_tokens": 12, "temperature": 3.0}
        first, second, again = [asked(one, PROMPTS[:1], seeds=(seed,), **how)[0] for seed in (1, 2, 1)]
    assert first.tokens == again.tokens
    assert first.tokens != second.tokens
    check(first)


def test_sampling_is_from_the_whole_distribution(tiny):
    """Neither the checkpoint's top_k of 3 nor transformers' own of 50 is heeded."""
    with opened("transformers", tiny, batch=200) as one:
        turns = asked(one, [PROMPTS[1]] * 200, max_tokens=1, temperature=50.0, seeds=tuple(range(200)))
    assert len({turn.tokens[0] for turn in turns}) > 100


def test_a_mode_for_one_takes_one(tiny):
    with opened("transformers-lookup", tiny) as one:
        assert one.slots == 1
    assert peer("transformers", tiny).slots == 4


def test_peers_share_a_model_and_give_it_back(tiny, draft):
    first, second = peer("transformers", tiny), peer(f"transformers-assisted:{draft}", tiny)
    for one in (first, second):
        one.open()
    assert first.model is second.model
    assert len(ours._LOADED) == 2
    first.close()
    expected = answers(tiny)[0]
    assert asked(second, PROMPTS[:1], max_tokens=NEW)[0].tokens == expected
    second.close()
    assert ours._LOADED == {}


def test_a_draft_model_of_another_vocabulary_is_refused(tiny, tmp_path):
    other = models.make("llama2", tmp_path, vocab_size=352)
    one = peer(f"transformers-assisted:{other}", tiny)
    with pytest.raises(ModelError, match="knows 352 tokens and the target 320"):
        one.open()
    one.close()
    assert ours._LOADED == {}


def test_what_a_schedule_learnt_is_forgotten(tiny, draft):
    """The heuristic schedule keeps its draft length from call to call."""
    with opened(f"transformers-assisted:{draft},tokens=2,schedule=heuristic,confidence=0", tiny) as one:
        first, later = [asked(one, PROMPTS[2:], max_tokens=NEW)[0] for _ in range(2)]
        one.forget()
        (again,) = asked(one, PROMPTS[2:], max_tokens=NEW)
    assert later.nodes is not None
    assert (first.nodes[0], again.nodes, len(later.tokens)) == (2, first.nodes, len(first.tokens))


def test_transformers_is_silent(tiny, draft, capfd):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for spec in ("transformers", *ALONE):
            with opened(spec.format(draft=draft), tiny) as one:
                asked(one, PROMPTS[:1], max_tokens=4, temperature=0.5)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("spec", ["transformers"])
def test_transformers_is_woken(spec, tiny):
    with opened(spec, tiny) as one:
        [before] = asked(one, PROMPTS[:1], max_tokens=NEW)
        forwards = []
        hook = one.model.register_forward_hook(lambda *_: forwards.append(1))
        began = perf_counter()
        one.wake(0.05)
        assert perf_counter() - began > 0.05
        assert forwards, "its own forward is what wakes it"
        hook.remove()
        [after] = asked(one, PROMPTS[:1], max_tokens=NEW)
    assert after.tokens == before.tokens


def test_a_gguf_file_is_run_with_the_weights_that_our_engine_expands(tmp_path, monkeypatch):
    """From a folder that is made once."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file = tmp_path / "model.gguf"
    gguf_files.write(models.make("llama2", tmp_path / "folder", num_hidden_layers=2), file, "Q8_0")
    expected = answers(file)
    written = set()
    for _ in range(2):
        with opened("transformers", file) as one:
            assert [asked(one, [prompt], max_tokens=NEW)[0].tokens for prompt in PROMPTS] == expected
        (made,) = (tmp_path / "cache" / "paceline" / "expanded").iterdir()
        written.add((made.name, (made / "model.safetensors").stat().st_mtime_ns))
    assert len(written) == 1


def test_a_gguf_file_may_be_expanded_by_two_processes_at_once(tmp_path, monkeypatch):
    """The folder is there when it is whole, and the second one to finish leaves it as it is."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file = tmp_path / "model.gguf"
    gguf_files.write(models.make("llama2", tmp_path / "folder", num_hidden_layers=2), file, "Q8_0")
    meanwhile = []

    def save(weights, path, metadata):
        save_file(weights, path, metadata)
        if not meanwhile:
            meanwhile.append(path)
            meanwhile.append(setup.expanded(file, torch.float32))  # what another process does

    monkeypatch.setattr(setup, "save_file", save)
    folder = setup.expanded(file, torch.float32)
    assert folder == meanwhile[1] != meanwhile[0].parent
    assert [one.name for one in folder.parent.iterdir()] == [folder.name]
    assert {one.name for one in folder.iterdir()} >= {"config.json", "model.safetensors"}
    (folder / "config.json").unlink()  # as an earlier version may have left it
    with pytest.raises(PacelineError, match="not whole and in the way: delete it"):
        setup.expanded(file, torch.float32)
