"""The ids that a batch looks up, found out before training: a forward on the meta device with the batch's integers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from colossus.config import Config
from colossus.config.schema import Parallel
from colossus.construct.build_model import build
from colossus.context.parallel_context import ParallelContext
from colossus.data.batch import map_batch, split_microbatches
from colossus.engine.inputs import model_input
from colossus.engine.loss_function import LossFunction
from colossus.engine.sparse.plain_modules import look_up_in_rows
from colossus.engine.sparse.tables import table_modules
from colossus.layers import Dropout
from colossus.layout.parameter import spec_of
from colossus.random import GLOBAL_RNG
from colossus.rows.row_source import give_row_source

#: full name of a table -> the ids of each lookup in it, in order, each [samples, ..] of a microbatch
Lookups = dict[str, list[Tensor]]


class UnknownIds(Exception):
    """The ids of a lookup follow from numbers that are not there on the meta device."""


def lookups_of(
    factory: Callable[[], nn.Module],
    config: Config,
    batches: Sequence[Any],
    loss_fn: LossFunction | None = None,
    step: int = 0,
) -> list[Lookups]:
    """What a model looks up in its tables in one step of one process, for each of some batches, loss included.

    The model is built on the meta device and gets the integers of a batch as they are, everything else without values;
    what is computed from integers alone stays real. Nothing is allocated for its parameters, nothing is communicated.

    Args:
        batches: each of a data rank: all its microbatches.
        loss_fn: by default the model's own ``loss``, where it has one.
        step: of the random streams, of which sampled negatives are drawn.

    Raises:
        UnknownIds: for ids that follow from floating-point numbers.
        Exception: whatever the model raises on the meta device.
    """
    alone = config.model_copy(update={"parallel": Parallel(data=1)})
    context = ParallelContext.from_config(alone, connect=False)
    found: list[Lookups] = []
    with GLOBAL_RNG.preserved():
        model = build(factory, context, materialize=False)
        recorders = _record(model)
        loss = loss_fn or getattr(model, "loss", None)
        for batch in batches:
            for recorder in recorders.values():
                recorder.calls = []
            given = map_batch(_integers, batch)
            with context, torch.no_grad(), _RealIntegers():
                for number, microbatch in enumerate(split_microbatches(given, config.schedule.microbatches)):
                    context.rng.move_to(step, number)
                    outputs = model(model_input(microbatch))
                    if loss is not None:
                        loss(outputs, microbatch)
            found.append({name: recorder.calls for name, recorder in recorders.items()})
    return found


def _record(model: nn.Module) -> dict[str, _Recorder]:
    """Let all lookups in tables be noted; dropout, which has nothing to drop, is off."""
    found: dict[str, _Recorder] = {}
    for _, module, weight in table_modules(model):
        recorder = found.setdefault(spec_of(weight).name, _Recorder(weight))
        give_row_source(weight, recorder)
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            look_up_in_rows(module)
    for module in model.modules():
        if isinstance(module, Dropout | nn.modules.dropout._DropoutNd):
            module.eval()
    return found


def num_integers(batch: Any) -> int:
    """How many integers a model is given of a batch: at most so many rows it looks up, unless it makes ids itself."""
    return sum(
        x.numel()
        for x in tree_leaves(model_input(batch))
        if isinstance(x, Tensor) and not x.is_floating_point() and not x.is_complex()
    )


def _integers(x: Tensor) -> Tensor:
    return x.to("meta") if x.is_floating_point() or x.is_complex() else x.cpu()


class _Recorder:
    """A `RowSource` that notes what is looked up, and gives rows without values."""

    def __init__(self, table: Tensor) -> None:
        self._table = table
        self.calls: list[Tensor] = []

    def look_up(self, ids: Tensor, padding_idx: int | None = None) -> tuple[Tensor, Tensor]:
        if ids.is_meta:
            raise UnknownIds("ids are computed from what has no values on the meta device")
        self.calls.append(ids)
        distinct, where = torch.unique(ids, return_inverse=True)
        return self.read(distinct), where

    def read(self, ids: Tensor) -> Tensor:
        return self._table.new_empty((len(ids), *self._table.shape[1:]), device="meta")

    def require_ids(self, ids: Tensor) -> None: ...


class _RealIntegers(TorchDispatchMode):
    """Where an operator meets tensors with values and tensors without, all are without."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten.index.Tensor:  # where a mask is true is known while it has values
            args = args[0], [each for index in args[1] for each in _places(index)]
        if any(leaf.is_meta for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)):
            args, kwargs = tree_map_only(Tensor, lambda x: x if x.is_meta else x.to("meta"), (args, kwargs))
        return func(*args, **kwargs)


def _places(index: Tensor | None) -> Sequence[Tensor | None]:
    """A mask as the indices of its true elements; other indices as they are."""
    if index is None or index.is_meta or index.dtype != torch.bool:
        return [index]
    return index.nonzero(as_tuple=True)
