"""Exact sums of gradients in buckets, overlapped with backward: in one level, by hosts, or of tables by rows."""

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
    """Sums gradients over data ranks in the collectives that sum them over the other ranks, too.

    Exact; a subclass that is not sums them inside of the replica only.

    With ``compress`` what goes along data is rounded to bf16, or to matrices of low rank (1905.13727): replicas stay
    equal, but the sums are not those of one process. What is left out of a step's gradients is added to the next one's
    (error feedback). Sums inside of a replica are exact.
    """

    _compress: AllReduceOptions = AllReduceOptions()
    _feedback: ErrorFeedback | None = None
    #: into how many parts the rows of an owned table are cut; None: one for each owner
    partitions: int | None = None

    def __init__(self, **options: Any) -> None:
        self._compress = AllReduceOptions(**options)

    def check_tables(self, found: Survey) -> None:
        if not self.exact or self._compress.compress is not None:
            super().check_tables(found)

    def prepare(self, model: nn.Module, context: ParallelContext) -> None:
        tables = Tables(model, context, self.way_of, partitions=self.partitions)
        self.tables = tables if tables else None

    def way_of(self, name: str, shape: tuple[int, ...], ranks: int) -> str:
        """How the gradient of a table is summed over so many ranks that share it."""
        return "dense"

    def setup(self, store: ParameterStore, parts: ModelParts) -> None:
        if self.tables is not None:
            self.tables.connect(parts.model, self.hosts_of_rows())
        store.shard(())  # nothing is cut: the copies of low precision that compute takes are kept beside what is stored
        super().setup(store, parts)
        if self._compress.compress is not None:
            self.state_per_replica = True
            self._feedback = ErrorFeedback(store.stored, parts.context.rng.seed)
        self._reduction = self.make_reduction()

    def hosts_of_rows(self) -> Hosts | None:
        """Inside of which hosts the gradients of tables are added up before they leave them; None: nowhere."""
        return None

    def make_reduction(self) -> GradientReduction:
        """What sums the gradients of a step."""
        return GradientReduction(self.without_tables(self.parts), self.summed_axes, self.sum_of)

    def without_tables(self, parts: ModelParts) -> ModelParts:
        """What is summed in buckets."""
        if (tables := self.tables) is None:
            return parts
        dense = {
            stage: [param for param in params if tables.of(param) is None]
            for stage, params in parts.parameters_by_stage.items()
        }
        return replace(parts, parameters_by_stage=dense)

    def sum_of(self, params: Sequence[nn.Parameter], axes: tuple[str, ...], dtype: torch.dtype) -> BucketSum:
        """How the gradients of a bucket are summed over these axes."""
        options, context = self._compress, self.parts.context
        if self._feedback is None or "data" not in axes:
            return FlatSum(context.group(axes))
        replica = tuple(axis for axis in axes if axis != "data")
        if options.compress == "powersgd":
            given = options.model_dump(include={"rank", "start_step", "min_compression_rate"})
            return PowerSum(params, *self.levels(axes), self._feedback, **given)
        return Bf16Sum(params, context.group(replica), *self.levels(("data",)), self._feedback)

    def levels(self, axes: tuple[str, ...]) -> tuple[AxisGroup, AxisGroup]:
        """Of the ranks over these axes, data among them: those that are summed over exactly, and those between which
        what travels is compressed.
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
            self.tables.serve()

    # -- state ----------------------------------------------------------------------------------------------

    def parameter_state(self) -> Mapping[nn.Parameter, Mapping[str, Any]]:
        return {} if self._feedback is None else self._feedback.state()

    def load_parameter_state(self, state: Mapping[nn.Parameter, Mapping[str, Any]]) -> None:
        if self._feedback is not None:
            self._feedback.load(state)


class Hierarchical(AllReduce):
    """Exact. Gradients are reduce-scattered over the ranks of a host, all-reduced between hosts, and all-gathered over
    the ranks of a host; else as all-reduce: in buckets, while backward runs.

    Hosts are given (``hosts`` or ``per_host``: neighbours along data share one), or found by what ranks know of the
    machines they are on. ``compress`` is of what goes between hosts.
    """

    def __init__(self, **options: Any) -> None:
        self.options = self._compress = HierarchicalOptions(**options)

    def setup(self, store: ParameterStore, parts: ModelParts) -> None:
        context, per_host = parts.context, self.options.ranks_per_host(parts.context.size("data"))
        self.hosts = Hosts.detect(context) if per_host is None else Hosts.of_size(context, per_host)
        super().setup(store, parts)

    def sum_of(self, params: Sequence[nn.Parameter], axes: tuple[str, ...], dtype: torch.dtype) -> BucketSum:
        if "data" not in axes or len(self.hosts.sets) == 1:
            return FlatSum(self.parts.context.group(axes))
        if self._feedback is not None or self.hosts.per_host == 1:
            return super().sum_of(params, axes, dtype)
        return TwoLevelSum(self.hosts.inside(axes), self.hosts.between())

    def hosts_of_rows(self) -> Hosts | None:
        return self.hosts if self.hosts.are_levels else None

    def levels(self, axes: tuple[str, ...]) -> tuple[AxisGroup, AxisGroup]:
        return self.hosts.inside(axes), self.hosts.between()


class Hybrid(AllReduce):
    """Exact. Dense gradients are all-reduced in buckets; tables (``sparse=True``) are held and updated by ranks that
    own their rows, which sends the fewest bytes, after Parallax (1808.02621).

    Attributes:
        choices: by full name of the table.
        hosts: over which data ranks are spread; None where nobody asks, or hosts have unequal numbers of them.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = HybridOptions(**options)
        self.partitions = self.options.partitions
        self.choices: dict[str, Choice] = {}
        self.hosts: Hosts | None = None

    def check_tables(self, found: Survey) -> None:
        if problems := way_problems(self.options.ways, found):
            raise ValueError("; ".join(problems))
        self.choices = {table.name: choose(table, self.options.way_of(table.name)) for table in found.tables}

    def prepare(self, model: nn.Module, context: ParallelContext) -> None:
        per_host = self.options.ranks_per_host(context.size("data"))
        if self.choices and per_host is not None:
            self.hosts = Hosts.of_size(context, per_host)
        elif self.choices and context.size("data") > 1:
            with suppress(ValueError):  # on all ranks: as many data ranks on each are what two levels need
                self.hosts = Hosts.detect(context)
        super().prepare(model, context)

    def choices_made(self) -> list[str]:
        return [choice.in_words for choice in self.choices.values()]

    def way_of(self, name: str, shape: tuple[int, ...], ranks: int) -> str:
        return self.choices[name].way

    def hosts_of_rows(self) -> Hosts | None:
        return self.hosts if self.hosts is not None and self.hosts.are_levels else None
