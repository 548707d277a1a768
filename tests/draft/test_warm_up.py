"""Nothing is compiled in a timed round: `bind` has done it."""

import subprocess
import sys

import pytest

PROGRAM = """
from paceline.draft import prompt_lookup
from paceline.draft.text import automaton
from paceline.draft.registry import create
from tests.draft.rows import draft_of, target

kernels = [prompt_lookup._find] if SPEC == "prompt-lookup" else [automaton._extend, automaton._hash_all]
drafter = create(SPEC)
assert not any(kernel.signatures for kernel in kernels), "compiled before it was asked for"
drafter.bind(target())
before = [len(kernel.signatures) for kernel in kernels]
assert min(before) == 1, "bind did not compile"
for text in ["a", "abab", "abc" * 500]:
    draft_of(drafter, text)
assert [len(kernel.signatures) for kernel in kernels] == before, "a round compiled"
print("fine")
"""


@pytest.mark.parametrize("spec", ["prompt-lookup", "sam"])
def test_bind_compiles_and_rounds_do_not(spec):
    program = f"SPEC = {spec!r}\n{PROGRAM}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "fine\n", done.stderr
