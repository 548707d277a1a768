"""A disk that takes no more, for a test of what is left on it."""

import resource
from contextlib import contextmanager


@contextmanager
def full_after(num_bytes):
    """No file of this process may be larger: a write beyond fails as on a full disk, but for the error's number."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
