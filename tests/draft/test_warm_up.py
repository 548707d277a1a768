"""Nothing is compiled in a timed round: `bind` has done it."""

import re
import subprocess
import sys

from paceline.draft.text import ngrams, suffix_array
from tests.draft.stores import corpus

METHODS = ["prompt-lookup", "sam", "rest", "suffix", "hierarchy"]

PROGRAM = """
import os, sys, traceback
from paceline.draft.methods import hierarchy, prompt_lookup
from paceline.draft.text import automaton, ngrams, suffix_array
from paceline.draft.text import suffix_tree as suffix_nodes
from paceline.draft.registry import create
from tests.asks import asked
from tests.draft.rows import row, target

STORE = sys.argv[1]
KERNELS = {
    "prompt-lookup": [prompt_lookup._find],
    f"sam,corpus={STORE}": [
        automaton._extend, automaton._hash_all, suffix_array._longest, suffix_array.likeliest,
    ],
    f"rest:{STORE},hits=1": [suffix_array._longest, suffix_array.likeliest],
    f"suffix,corpus={STORE},past=50": [suffix_nodes.append, suffix_nodes.speculate, suffix_array._speculate],
    f"hierarchy,past=50,corpus={STORE}": [suffix_array._find, ngrams._learn, ngrams._after, hierarchy._tree],
}

def check(spec, kernels):
    drafter, one = create(spec), target(".")
    one.tokenizer = None
    assert not any(kernel.signatures for kernel in kernels), "compiled before it was asked for"
    drafter.bind(one)
    before = [len(kernel.signatures) for kernel in kernels]
    assert all(before), f"bind did not compile: {before}"
    for id, (text, room) in enumerate([("a", 9), ("abab", 3), ("the cat", 100), ("abc" * 500, 100), ("xyzab", 2)]):
        request = row(text, room, id=id)
        drafter.start(request)
        for gained in ([], [98], [99, 97]):
            request.extend(gained)
            drafter.propose(asked(request))
        request.finish_reason = "stop"
        drafter.drop(request)
    assert [len(kernel.signatures) for kernel in kernels] == before, "a round compiled"

for spec, kernels in KERNELS.items():
    if not (child := os.fork()):  # each in a process where nothing is compiled
        try:
            check(spec, kernels)
            print(spec, flush=True)
        except BaseException:
            traceback.print_exc()
        os._exit(0)
    os.waitpid(child, 0)
"""


def test_bind_compiles_and_rounds_do_not(tmp_path):
    """Of all methods with kernels, in an interpreter of its own that imports once."""
    store = corpus(tmp_path / "store", ["abcde", "abxyz", "abxyw", "the cat sat"], parts=(ngrams, suffix_array))
    done = subprocess.run([sys.executable, "-c", PROGRAM, store], capture_output=True, text=True)
    assert re.findall(r"^[\w-]+", done.stdout, re.MULTILINE) == METHODS, done.stderr
