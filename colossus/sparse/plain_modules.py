"""torch's own embedding modules with sparse gradients, in a user's model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from colossus.layers.forward_under import ForwardUnder
from colossus.layers.lookup import sparse_embedding
from colossus.layout.parameter import spec_of
from colossus.rows.row_gradient import row_source
from colossus.sharded_tensor.placement import Place
from colossus.sharded_tensor.regions import local, sequence_place, with_sequence
from colossus.sharded_tensor.tensor import ShardedTensor
from colossus.sparse.embedding_bag import embedding_bag, require_whole_bags


def look_up_in_rows(module: nn.Module) -> None:
    """Make ``module.forward``, also a user's own, look up in the row source of its table; hooks stay outside."""
    if not isinstance(vars(module).get("forward"), RowForward):
        RowForward(module)


class RowForward(ForwardUnder):
    """A forward whose lookups go to the row source of their table."""

    def mode(self) -> TorchFunctionMode:
        return _RowLookups()


class _RowLookups(TorchFunctionMode):
    """A mode in which lookups of ``torch.nn.functional`` in a table with a row source go to that source."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func not in (F.embedding, F.embedding_bag):
            return func(*args, **kwargs)
        weight = kwargs["weight"] if "weight" in kwargs else args[1]
        if row_source(weight) is None:
            return func(*args, **kwargs)
        return (_embedding if func is F.embedding else _embedding_bag)(*args, **kwargs)


def _embedding(input: Tensor, weight: Tensor, padding_idx: int | None = None, *_: Any, **more: Any) -> Tensor:
    return _marked(_narrowed(sparse_embedding(local(input), weight, padding_idx), weight), sequence_place(input), input)


def _embedding_bag(
    input: Tensor,
    weight: Tensor,
    offsets: Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Tensor:
    place = require_whole_bags(input, offsets, "EmbeddingBag")
    out = embedding_bag(
        local(input),
        weight,
        mode=mode,
        sparse=True,
        per_sample_weights=None if per_sample_weights is None else local(per_sample_weights),
        padding_idx=padding_idx,
        title="EmbeddingBag",
    )
    return _marked(_narrowed(out, weight), place, input)


def _narrowed(rows: Tensor, weight: Tensor) -> Tensor:
    """Return rows in the dtype of the model's parameters, which may be narrower than that of the table."""
    return rows.to(spec_of(weight).computed_dtype or weight.dtype)


def _marked(out: Tensor, place: Place | None, source: Tensor) -> Tensor:
    return with_sequence(out, place, source.placement.parallel) if isinstance(source, ShardedTensor) else out
