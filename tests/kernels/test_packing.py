"""Packing moves every bit where `Format.columns` puts it."""

import pytest
import torch
from torch.nn.functional import pad

from paceline.kernels.blocks import Q4_0, Blocks
from paceline.kernels.integer import FORMATS
from paceline.kernels.packing import COLUMNS, packed


def expected(unit, data, panels):
    """The panels, by torch: in a unit, the values of 16 outputs lie side by side, field by field."""
    fields = []
    for field in unit.columns(data):
        full = pad(field, (0, 0, 0, 0, 0, panels * COLUMNS - len(field)))
        lanes = full.unflatten(0, (panels, COLUMNS)).permute(0, 2, 3, 1).contiguous()
        fields.append(lanes.view(torch.uint8).flatten(2))
    return torch.cat(fields, -1)


@pytest.mark.parametrize("unit", FORMATS.values(), ids=lambda unit: unit.kind.name)
@pytest.mark.parametrize(("outputs", "blocks"), [(40, 3), (16, 4), (5, 1)])
def test_parts_are_packed_side_by_side(unit, outputs, blocks):
    """Panels and units that are not full, and parts that begin inside a panel."""
    data = torch.randint(0, 256, (outputs, blocks * unit.kind.nbytes), dtype=torch.uint8)
    panels, units = 4, -(-blocks // unit.per_unit)
    parts = [Blocks(unit.kind, part) for part in (data[:3], data[3:])]
    assert torch.equal(packed(unit, parts, panels, units), expected(unit, data, panels))


def test_rows_that_are_apart_are_packed():
    unit = FORMATS[Q4_0]
    wide = torch.randint(0, 256, (16, 8 * unit.kind.nbytes), dtype=torch.uint8)
    data = wide[:, : 2 * unit.kind.nbytes]
    assert torch.equal(packed(unit, [Blocks(unit.kind, data)], 1, 1), expected(unit, data.contiguous(), 1))
