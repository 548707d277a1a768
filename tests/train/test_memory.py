"""Memory that a training step frees is there for the next one without the kernel clearing it anew."""

import subprocess
import sys

import pytest

SCRIPT = """
import ctypes, resource, sys
from paceline.train.options import keep_freed_memory
if sys.argv[1] == "keep" and not keep_freed_memory():
    print("no glibc")
    sys.exit()
ctypes.CDLL(None).prctl(41, 1, 0, 0, 0)  # PR_SET_THP_DISABLE: small pages, whatever the machine prefers
def use():
    b"x" * (64 << 20)  # 64 MB, freed at once
use()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(4):
    use()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(how):
    """Pages that were asked for anew in four rounds."""
    done = subprocess.run([sys.executable, "-c", SCRIPT, how], capture_output=True, text=True, check=True)
    if done.stdout.strip() == "no glibc":
        pytest.skip("the C library is not glibc")
    return int(done.stdout)


def test_freed_memory_is_kept():
    assert 10 * faults("keep") < faults("leave")
