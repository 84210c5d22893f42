"""What a layer's forward is called with has the names that it has in torch."""

from __future__ import annotations

import inspect

import pytest
from torch import nn

from colossus.convert.layer_table import ROWS, Row
from colossus.layers.layer import Layer


def names(kind: type[nn.Module]) -> list[str]:
    return [*inspect.signature(kind.forward).parameters]


@pytest.mark.parametrize("row", [row for row in ROWS if row.torch is not None], ids=lambda row: row.ours.__name__)
def test_a_forward_takes_the_keyword_arguments_of_torch(row: Row) -> None:
    assert issubclass(row.ours, Layer)
    assert row.torch is not None
    assert names(row.ours) == names(row.torch)
