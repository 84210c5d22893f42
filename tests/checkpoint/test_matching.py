"""Which saved tensor goes where, by names and shapes: patterns, renames, ties, tables that have grown."""

from __future__ import annotations

from typing import Any

import pytest

from colossus.checkpoint.errors import CheckpointError
from colossus.checkpoint.matching import Shape, WeightMatch, match_exactly, match_weights, renamed

NAMES = ["embedding.weight", "blocks.0.up.weight", "blocks.0.up.bias", "blocks.1.up.weight", "norm.weight"]


def match(model: dict[str, Shape], saved: dict[str, Shape], aliases: dict[str, str], **options: Any) -> WeightMatch:
    """The match of a model whose tensors have one name each."""
    return match_weights(model, {name: (name,) for name in model}, saved, aliases, **options)


@pytest.mark.parametrize(
    ("rename", "wanted"),
    [
        (None, NAMES),
        ({"blocks": "layers"}, [n.replace("blocks.", "layers.") for n in NAMES]),
        ({"": "trunk"}, [f"trunk.{n}" for n in NAMES]),
        ({"blocks.0": ""}, [n.removeprefix("blocks.0.") for n in NAMES]),
        ({"blocks.*.up.*": "blocks.*.up.base.*"}, [n.replace("up.", "up.base.") for n in NAMES]),
        ({"blocks.1.*": None}, [n if "blocks.1" not in n else None for n in NAMES]),
        # the first key that meets a name renames it, and a later one may be hidden by it
        ({"blocks.0.*": "first.*", "blocks": "layers"}, [NAMES[0], "first.up.weight", "first.up.bias",
                                                         "layers.1.up.weight", NAMES[-1]]),
        (lambda name: name.upper(), [n.upper() for n in NAMES]),
    ],
)  # fmt: skip
def test_renames(rename: Any, wanted: list[str | None]) -> None:
    assert list(renamed(NAMES, rename).values()) == wanted


@pytest.mark.parametrize(
    ("rename", "message"),
    [
        ({"block": "layers"}, r"rename: 'block' matches no name of the checkpoint"),
        ({"blocks.*.up.*": "layers.*"}, r"'blocks\.\*\.up\.\*' has 2 stars, 'layers\.\*' has 1"),
    ],
)
def test_renames_that_cannot_be_meant(rename: Any, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        renamed(NAMES, rename)


def test_the_same_model_is_asked_for_everything() -> None:
    model = dict(a=(2, 3), b=(4,), c=(1,))
    assert match_exactly(model, {"a": (2, 3), "b": (4,), "c": (1,)}).is_complete
    matched = match_exactly(model, {"a": (3, 3), "b": (4,), "d": (1,)})
    assert dict(matched.sources) == {"b": "b"}
    assert str(matched) == "1 missing there: c; 1 not in this model: d; 1 of another shape: a (3, 3) there, (2, 3) here"


def test_tables_have_other_rows_where_that_is_said() -> None:
    model, saved = dict(table=(7, 3), other=(5, 3)), {"table": (5, 3), "other": (4, 3)}
    matched = match(model, saved, {}, grow=["table"])
    assert dict(matched.sources) == {"table": "table"}
    assert dict(matched.resized) == {"table": (5, 7)}
    assert dict(matched.other_shape) == {"other": ((4, 3), (5, 3))}
    assert dict(match(dict(table=(4, 3)), saved, {}, shorten=["table"]).resized) == {"table": (5, 4)}
    for there, here in (((7, 3), (5, 3)), ((5, 3), (7, 4)), ((5,), (7, 1))):
        model = {"table": here, "a": (1,)}
        matched = match(model, {"table": there, "a": (1,)}, {}, grow=["table"])
        assert dict(matched.other_shape) == {"table": (there, here)}


def test_ties_on_either_side() -> None:
    tied: Any = ({"embedding": (5, 3)}, {"embedding": ("embedding", "head")})
    apart: Any = dict(embedding=(5, 3), head=(5, 3))
    # tied there, apart here; and one name there, another of it here
    matched = match(apart, {"embedding": (5, 3)}, {"head": "embedding"})
    assert dict(matched.sources) == {"embedding": "embedding", "head": "embedding"}
    assert dict(match_weights(*tied, {"head": (5, 3)}, {}).sources) == {"embedding": "head"}
    assert dict(match_weights(*tied, {"head": (5, 3)}, {}, only=["head"]).sources) == {"embedding": "head"}
    # apart there, tied here: which one is meant must be said
    saved = {"embedding": (5, 3), "head": (5, 3)}
    with pytest.raises(CheckpointError, match=r"embedding and head of the checkpoint both go to embedding "):
        match_weights(*tied, saved, {})
    matched = match_weights(*tied, saved, {}, rename={"embedding": None})
    assert dict(matched.sources) == {"embedding": "head"}
    assert matched.is_complete
