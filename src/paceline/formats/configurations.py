"""transformers' configurations, without its models.

A Llama's configuration imports the checks of entries, and these the table of activations, which brings kernels of the
hub, distributed tensors and torch's compiler: a second, and 60 MB, for names that most configurations never look up."""

import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any

TABLE, CHECKS = "transformers.activations", "transformers.utils.type_validators"


class _Activations(Mapping[str, Any]):
    """transformers' table of activations, imported when it is first read."""

    def __getitem__(self, name: str) -> Any:
        return self._table[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._table)

    def __len__(self) -> int:
        return len(self._table)

    @property
    def _table(self) -> Mapping[str, Any]:
        table: Mapping[str, Any] = import_module(TABLE).ACT2FN
        return table


@cache
def import_checks() -> None:
    """Import the checks with a table that is read later. Call it before the first configuration is made."""
    if TABLE in sys.modules or CHECKS in sys.modules:
        return
    later: Any = ModuleType(TABLE)
    later.ACT2FN = _Activations()
    sys.modules[TABLE] = later
    try:
        with suppress(ImportError):  # Another version of transformers may have no such module.
            import_module(CHECKS)
    finally:
        del sys.modules[TABLE]
