"""Our engine as it is measured."""

from itertools import count

from paceline.bench import ours
from paceline.bench.ours import Ours
from paceline.draft.methods.recycling import Recycling
from paceline.target.load import load, load_tokenizer


def test_a_drafter_does_not_learn_while_it_is_woken(demo, monkeypatch):
    one = Ours("recycling,tree=16", load(demo), load_tokenizer(demo), batch=1)
    one.open()
    body = {"messages": [{"role": "user", "content": "List ten fruits."}], "max_tokens": 24}
    [before] = one.ask([body])
    one.forget()
    with monkeypatch.context() as patch:
        patch.setattr(Recycling, "propose", None)
        patch.setattr(Recycling, "observe", None)
        verify, forwards = one.target.verify, []
        patch.setattr(one.target, "verify", lambda *args: forwards.append(1) or verify(*args))
        clock = count(0.0, 0.02)
        patch.setattr(ours, "perf_counter", lambda: next(clock))
        one.wake(0.05)  # looks at the clock at 0.02, 0.04 and 0.06
        assert len(forwards) == 4, "the target's own forward is what wakes it, twice two tokens"
    [after] = one.ask([body])
    assert (after.tokens, after.nodes) == (before.tokens, before.nodes)
