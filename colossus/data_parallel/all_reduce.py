"""Sums of gradients in buckets, overlapped with backward: in one level, by hosts, or with rows of tables apart."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from colossus.context.groups import AxisGroup
from colossus.context.parallel_context import ParallelContext
from colossus.data_parallel.options.exact_options import AllReduceOptions, HierarchicalOptions, HybridOptions
from colossus.data_parallel.strategy import Strategy
from colossus.data_parallel.zero.parameter_store import ParameterStore
from colossus.gradients.bucket_sum import BucketSum, FlatSum, Hosts, TwoLevelSum
from colossus.gradients.compressed_sum import Bf16Sum, ErrorFeedback, PowerSum
from colossus.gradients.reduction import GradientReduction, ModelParts
from colossus.sparse.choice import Choice, Survey, choose, way_problems
from colossus.sparse.tables import Tables


class AllReduce(Strategy):
    """The all-reduce of gradients over data ranks, in the collectives that also sum them over the other ranks.

    It is exact. An inexact subclass sums gradients inside a replica only.

    With ``compress`` gradients are rounded along data, to bf16 or to matrices of low rank (1905.13727). Replicas stay
    equal, but the sums are not those of one process. The rounding errors of a step are added to the next step's
    gradients (error feedback). Sums inside a replica are exact.
    """

    _compress: AllReduceOptions = AllReduceOptions()
    _feedback: ErrorFeedback | None = None
    #: the number of parts into which the rows of an owned table are cut; None: one for each owner
    partitions: int | None = None

    def __init__(self, **options: Any) -> None:
        self._compress = AllReduceOptions(**options)

    def check_tables(self, survey: Survey) -> None:
        if not self.exact or self._compress.compress is not None:
            super().check_tables(survey)

    def prepare(self, model: nn.Module, context: ParallelContext) -> None:
        tables = Tables(model, context, self.way_of, partitions=self.partitions)
        self.tables = tables if tables else None

    def way_of(self, name: str, shape: tuple[int, ...], ranks: int) -> str:
        """Return the way in which the gradient of a table is summed over the ``ranks`` ranks that share it."""
        return "dense"

    def setup(self, store: ParameterStore, parts: ModelParts) -> None:
        if self.tables is not None:
            self.tables.connect(parts.model, self.hosts_of_rows())
        store.shard(())  # parameters are not sharded, but compute has copies of them in low precision
        super().setup(store, parts)
        if self._compress.compress is not None:
            self.state_per_replica = True
            self._feedback = ErrorFeedback(store.stored, parts.context.rng.seed)
        self._reduction = self.make_reduction()

    def hosts_of_rows(self) -> Hosts | None:
        """Return the hosts inside which the gradients of tables are summed before they leave, or None."""
        return None

    def make_reduction(self) -> GradientReduction:
        """Make the object that sums the gradients of a step."""
        return GradientReduction(self.without_tables(self.parts), self.summed_axes, self.sum_of)

    def without_tables(self, parts: ModelParts) -> ModelParts:
        """Return the parts without their tables, whose gradients are not summed in buckets."""
        if (tables := self.tables) is None:
            return parts
        dense = {
            stage: [param for param in params if tables.of(param) is None]
            for stage, params in parts.parameters_by_stage.items()
        }
        return replace(parts, parameters_by_stage=dense)

    def sum_of(self, params: Sequence[nn.Parameter], axes: tuple[str, ...], dtype: torch.dtype) -> BucketSum:
        """Make the sum of a bucket of gradients over these axes."""
        options, context = self._compress, self.parts.context
        if self._feedback is None or "data" not in axes:
            return FlatSum(context.state_group(axes))
        replica = tuple(axis for axis in axes if axis != "data")
        if options.compress == "powersgd":
            arguments = options.model_dump(include={"rank", "start_step", "min_compression_rate"})
            return PowerSum(params, *self.levels(axes), self._feedback, **arguments)
        return Bf16Sum(params, context.group(replica), *self.levels(("data",)), self._feedback)

    def levels(self, axes: tuple[str, ...]) -> tuple[AxisGroup, AxisGroup]:
        """Return the ranks over these axes that are summed over exactly, and those between which values are compressed.

        Args:
            axes: axes that include data.
        """
        return self.parts.context.group(tuple(axis for axis in axes if axis != "data")), self._data_group

    # -- a step -------------------------------------------------------------------------------------------

    def begin_step(self, step: int) -> None:
        if self._feedback is not None:
            self._feedback.begin(step, self.loss_scale)
        if self.tables is not None:
            self.tables.begin_step()

    def last_backward(self, stage: int) -> None:
        self._reduction.prepare(stage)

    def reduce(self, stage: int) -> None:
        self._reduction.start(stage)
        if self.tables is not None:
            self.tables.start_sums(self.parts.parameters_by_stage[stage])

    def finish(self) -> None:
        self._reduction.finish()
        if self.tables is not None:
            self.tables.finish_sums()
        self.store.accept_whole_gradients()

    def after_update(self, optimizer: torch.optim.Optimizer, found_inf: Tensor | None) -> None:
        if self._feedback is not None:
            self._feedback.end(found_inf)

    def report(self) -> dict[str, float]:
        return super().report() | (self.tables.report() if self.tables is not None else {})

    def forwards(self) -> AbstractContextManager[None]:
        return nullcontext() if self.tables is None else self.tables.forwards()

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        yield
        if self.tables is not None:
            self.tables.drain()

    # -- state ----------------------------------------------------------------------------------------------

    def parameter_state(self) -> Mapping[nn.Parameter, Mapping[str, Any]]:
        return {} if self._feedback is None else self._feedback.state()

    def load_parameter_state(self, state: Mapping[nn.Parameter, Mapping[str, Any]]) -> None:
        if self._feedback is not None:
            self._feedback.load(state)


class Hierarchical(AllReduce):
    """The all-reduce of gradients in two levels, inside hosts and between them. It is exact.

    Gradients are reduce-scattered over the ranks of a host, all-reduced between hosts, and all-gathered over the ranks
    of a host, in buckets while backward runs. With ``hosts`` or ``per_host``, consecutive ranks along data share a
    host; otherwise ranks compare the names of their machines. ``compress`` applies between hosts.
    """

    def __init__(self, **options: Any) -> None:
        self.options = self._compress = HierarchicalOptions(**options)

    def setup(self, store: ParameterStore, parts: ModelParts) -> None:
        context, per_host = parts.context, self.options.ranks_per_host(parts.context.size("data"))
        self.hosts = Hosts.detect(context) if per_host is None else Hosts.of_size(context, per_host)
        super().setup(store, parts)

    def sum_of(self, params: Sequence[nn.Parameter], axes: tuple[str, ...], dtype: torch.dtype) -> BucketSum:
        if "data" not in axes or len(self.hosts.sets) == 1:
            return FlatSum(self.parts.context.state_group(axes))
        if self._feedback is not None or self.hosts.per_host == 1:
            return super().sum_of(params, axes, dtype)
        return TwoLevelSum(self.hosts.inside(axes), self.hosts.between())

    def hosts_of_rows(self) -> Hosts | None:
        return self.hosts if self.hosts.has_two_levels else None

    def levels(self, axes: tuple[str, ...]) -> tuple[AxisGroup, AxisGroup]:
        return self.hosts.inside(axes), self.hosts.between()


class Hybrid(AllReduce):
    """The all-reduce of dense gradients in buckets, with tables (``sparse=True``) whose rows are owned. It is exact.

    A rank stores and updates the rows that it owns, which sends the fewest bytes (Parallax, 1808.02621).

    Attributes:
        choices: full name of a table -> its way.
        hosts: the hosts of the data ranks; None without tables, or where hosts have unequal numbers of data ranks.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = HybridOptions(**options)
        self.partitions = self.options.partitions
        self.choices: dict[str, Choice] = {}
        self.hosts: Hosts | None = None

    def check_tables(self, survey: Survey) -> None:
        if problems := way_problems(self.options.ways, survey):
            raise ValueError("; ".join(problems))
        self.choices = {table.name: choose(table, self.options.way_of(table.name)) for table in survey.tables}

    def prepare(self, model: nn.Module, context: ParallelContext) -> None:
        per_host = self.options.ranks_per_host(context.size("data"))
        if self.choices and per_host is not None:
            self.hosts = Hosts.of_size(context, per_host)
        elif self.choices and context.size("data") > 1:
            with suppress(ValueError):  # on all ranks: hosts have unequal numbers of data ranks, so sums have one level
                self.hosts = Hosts.detect(context)
        super().prepare(model, context)

    def choices_made(self) -> list[str]:
        return [choice.in_words for choice in self.choices.values()]

    def way_of(self, name: str, shape: tuple[int, ...], ranks: int) -> str:
        return self.choices[name].way

    def hosts_of_rows(self) -> Hosts | None:
        return self.hosts if self.hosts is not None and self.hosts.has_two_levels else None
