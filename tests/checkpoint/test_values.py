"""State that is no tensor comes back as what it was, out of JSON, or is refused."""

from __future__ import annotations

import enum
import json
from collections import Counter, OrderedDict
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from colossus.checkpoint.errors import CheckpointError
from colossus.checkpoint.values import TAGS, decode, encode

PLAIN = st.integers() | st.floats(allow_nan=False) | st.booleans() | st.none() | st.text()
KEYS = st.text() | st.sampled_from(TAGS) | st.integers() | st.tuples(st.integers(), st.text())
NESTS = st.recursive(
    PLAIN,
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(KEYS, inner),
    max_leaves=12,
)


def there_and_back(value: Any) -> Any:
    tensors: dict[str, Tensor] = {}
    text = json.dumps(encode(value, "state", tensors))
    return decode(json.loads(text), tensors.__getitem__)


def same_types(value: Any) -> Any:
    """The value with the types of all that is in it, which == does not compare."""
    if isinstance(value, dict):
        return type(value), [(same_types(key), same_types(each)) for key, each in value.items()]
    if isinstance(value, list | tuple):
        return type(value), [same_types(each) for each in value]
    return type(value), value


@given(NESTS)
def test_nests_come_back(value: Any) -> None:
    assert same_types(there_and_back(value)) == same_types(value)


def test_tensors_and_arrays_come_back() -> None:
    value = {"x": torch.arange(3), "y": (np.eye(2, dtype=np.float32), np.int16(7)), "z": torch.tensor(1.5)}
    back = there_and_back(value)
    assert torch.equal(back["x"], value["x"])
    assert back["y"][0].dtype == np.float32
    assert (back["y"][0] == np.eye(2)).all()
    assert back["y"][1] == 7
    assert type(back["y"][1]) is np.int16
    assert back["z"].shape == ()
    assert list(there_and_back(OrderedDict(b=1, a=2))) == ["b", "a"]


class Colour(enum.IntEnum):
    RED = 1


class Mine(dict):
    pass


@pytest.mark.parametrize(
    "value",
    [object(), Mine(), Counter(), {1}, b"", np.longdouble(1), np.array([None]), len, Colour.RED],
    ids=lambda value: type(value).__name__,
)
def test_what_would_not_come_back_is_refused_with_its_place(value: Any) -> None:
    with pytest.raises(CheckpointError, match=r"hooks/Mine\.a\.1: a .* cannot be saved"):
        encode({"a": [1, value]}, "hooks/Mine", {})
