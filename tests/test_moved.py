"""Names that moved are found where they were."""

import sys
from importlib import import_module

import pytest

from paceline.moved import MOVED

NAMES = [(old, new, name) for old, places in MOVED.items() for new, names in places.items() for name in names]


@pytest.mark.parametrize(("old", "new", "name"), NAMES)
def test_an_old_place_gives_what_is_in_the_new_one_and_says_where(old, new, name):
    module = import_module(old)
    assert name not in vars(module)
    found: dict[str, object] = {}
    with pytest.warns(DeprecationWarning, match=f"^{old}.{name} is {new}.{name} now$") as told:
        exec(compile(f"from {old} import {name}", __file__, "exec"), found)
    assert [one.filename for one in told] == [__file__]
    assert found[name] is vars(sys.modules[new])[name]
    assert not hasattr(module, name + "s")
