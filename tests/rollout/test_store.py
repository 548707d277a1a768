"""The store: keys, capacity, its file, several processes, kill -9."""

import signal
import sqlite3
import subprocess
import sys
import time

import numpy as np
import pytest

from paceline.errors import PacelineError, StoreError
from paceline.rollout.store import Entry, Key, RolloutStore, digest, numbered


def entry(tokens, version=0, visit=0):
    n = len(tokens)
    ids, best = np.tile(np.arange(2, dtype=np.int32), (n, 1)), np.full((n, 2), 0.25, np.float32)
    return Entry(np.array(tokens, np.int32), np.full(n, 0.5, np.float32), ids, best, version, visit, True, "top_p=1.0")


def key(name, copy=0):
    return Key(digest([name]), copy)


def tokens(store, name):
    stored = store.get(key(name))
    return None if stored is None else stored.tokens.tolist()


def test_copies_of_equal_prompts_are_numbered():
    a, b = digest([1, 2]), digest([1, 2, 3])
    assert a != b != digest([12])
    assert numbered([a, b, a, a]) == [Key(a, 0), Key(b, 0), Key(a, 1), Key(a, 2)]


def test_the_oldest_are_forgotten_first():
    size = entry([1] * 10).nbytes
    store = RolloutStore(capacity=3 * size)
    for name in range(3):
        store.put([(key(name), entry([name] * 10))])
    store.put([(key(0), entry([9] * 10))])  # not the oldest any more
    store.put([(key(3), entry([3] * 10))])
    assert [tokens(store, name) is not None for name in range(4)] == [True, False, True, True]
    assert (store.nbytes, len(store)) == (3 * size, 3)


def test_answers_of_old_policies_are_not_given_out():
    store = RolloutStore(max_age=2)
    store.put([(key(1), entry([1], version=5))])
    assert store.get(key(1), 7) is not None
    assert store.get(key(1), 8) is None


def test_a_file_keeps_everything_bit_for_bit(tmp_path):
    store = RolloutStore(tmp_path / "answers")
    one = entry([3, 1, 2], version=7, visit=4)
    store.put([(key(1), entry([5])), (key(2), one)])
    store.put([(key(1), entry([6, 7]))])
    again = RolloutStore(tmp_path / "answers")
    assert (len(again), tokens(again, 1)) == (2, [6, 7])
    back = again.get(key(2))
    for name in ("tokens", "probs", "top_ids", "top_probs"):
        array, read = getattr(one, name), getattr(back, name)
        assert array.dtype == read.dtype
        assert np.array_equal(array, read)
    assert (back.version, back.visit, back.finished, back.sampling) == (7, 4, True, "top_p=1.0")
    np.testing.assert_allclose(back.logprobs, np.log(0.5), rtol=1e-6)


def test_processes_see_each_others_answers(tmp_path):
    one, other = RolloutStore(tmp_path / "answers"), RolloutStore(tmp_path / "answers")
    one.put([(key(1), entry([1]))])
    other.put([(key(2), entry([2]))])
    assert [[tokens(store, name) for name in (1, 2)] for store in (one, other)] == [[[1], [2]]] * 2


def test_the_file_grows_with_what_is_kept_alone(tmp_path):
    path, capacity = tmp_path / "answers", 20 * entry([0] * 1000).nbytes
    store = RolloutStore(path, capacity=capacity)
    for turn in range(20):
        store.put([(key(turn * 5 + name), entry([turn] * 1000)) for name in range(5)])
        assert path.stat().st_size < 1.5 * capacity
    assert len(RolloutStore(path)) == 20


def test_a_batch_is_stored_whole_or_not_at_all(tmp_path):
    store = RolloutStore(tmp_path / "answers")
    with pytest.raises(Exception, match="not supported"):
        store.put([(key(1), entry([1])), (Key(object(), 0), entry([2]))])
    assert len(store) == 0
    store.put([(key(3), entry([3]))])
    assert len(RolloutStore(tmp_path / "answers")) == 1


def test_what_is_no_store_is_refused_and_unharmed(tmp_path):
    path, database = tmp_path / "notes.txt", tmp_path / "other.db"
    path.write_text("not a store, and worth keeping" * 100)
    with sqlite3.connect(database) as other:
        other.execute("CREATE TABLE notes (text TEXT)")
    for file in (path, database):
        before = file.read_bytes()
        with pytest.raises(StoreError, match=rf"{file.name} is not a store of rollouts"):
            RolloutStore(file)
        assert file.read_bytes() == before
    with pytest.raises(StoreError, match=r"notes\.txt/x cannot be used as a store"):
        RolloutStore(path / "x")
    with pytest.raises(PacelineError, match="capacity is 0"):
        RolloutStore(capacity=0)


def test_a_checkpoint_brings_back_the_entries():
    store = RolloutStore()
    store.put([(key(1), entry([1, 2]))])
    state = store.state_dict()
    store.put([(key(1), entry([3])), (key(2), entry([4]))])
    store.load_state_dict(state)
    assert ((len(store), tokens(store, 1)), store.nbytes) == ((1, [1, 2]), entry([1, 2]).nbytes)


WRITER = """
import sys
from tests.rollout.test_store import entry, key
from paceline.rollout.store import RolloutStore
store = RolloutStore(sys.argv[1])
print("go", flush=True)
turn = 0
while True:
    store.put([(key(name), entry([turn] * 200, version=turn)) for name in range(40)])
    turn += 1
"""


@pytest.mark.slow
def test_kill_9_leaves_whole_batches(tmp_path):
    """Two processes write batches of 40 keys as fast as they can and are killed: every key is there once, and whole."""
    path = tmp_path / "answers"
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True) for _ in range(2)
    ]
    for writer in writers:
        assert writer.stdout.readline() == "go\n"
    time.sleep(0.3)
    for writer in writers:
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        writer.stdout.close()
    store = RolloutStore(path)
    assert len(store) == 40
    for name in range(40):
        stored = store.get(key(name))
        assert stored.tokens.tolist() == [stored.version] * 200
    store.put([(key(0), entry([1]))])
    assert tokens(RolloutStore(path), 0) == [1]
