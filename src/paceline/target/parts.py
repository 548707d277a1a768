"""LayerPart: the base of what layers are made of."""

from __future__ import annotations

from collections.abc import Iterator

from paceline.kernels.linear import Linear
from paceline.kernels.ops import TorchOps


class LayerPart:
    """A part of a layer: matrix products, the elementwise steps between them, and smaller parts.

    PARTS  names of the attributes that hold a product, a part, a list of parts or None."""

    PARTS: tuple[str, ...]
    ops: TorchOps

    def _walk(self) -> Iterator[LayerPart | Linear]:
        """This part, and all parts and products in it."""
        yield self
        for value in (getattr(self, name) for name in self.PARTS):
            for inner in value if isinstance(value, list) else [value]:
                if isinstance(inner, LayerPart):
                    yield from inner._walk()
                elif inner is not None:
                    yield inner

    @property
    def products(self) -> list[Linear]:
        return [inner for inner in self._walk() if isinstance(inner, Linear)]

    def make_exact(self, ops: TorchOps) -> None:
        """Fix the order of sums of all products; use `ops` for the other steps."""
        for inner in self._walk():
            if isinstance(inner, LayerPart):
                inner.ops = ops
            else:
                inner.make_exact()
