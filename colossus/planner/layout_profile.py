"""A model under one layout, block by block: what a microbatch computes, sends and saves on a rank.

Tensor, sequence and expert parallelism, activation checkpointing and the samples of a microbatch make a layout. The
numbers of replicas and pipeline stages do not change its profile, so that plans are composed of its blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils._pytree import tree_leaves

from colossus.config import Config, ConfigError, model_options
from colossus.config.plans import name_of
from colossus.construct.build_model import build
from colossus.context.parallel_context import ParallelContext
from colossus.data.batch import map_batch
from colossus.data.model_input import model_input
from colossus.engine.checkpointed_modules import with_activation_checkpoint
from colossus.engine.inputs import ForwardCall, Inputs
from colossus.engine.loss_function import loss_of
from colossus.engine.parameter_groups import ParameterGroups, make_groups
from colossus.error_place import add_place
from colossus.layers.deferred_wgrad import DeferredWgrad
from colossus.layers.model_parallel import model_parallel_of
from colossus.layers.pipeline_block import NamedBlock, has_hooks, is_chain, pipeline_blocks
from colossus.planner.equal_blocks import runs_of, shallow, share_gradient_axes, unused, with_more_layers
from colossus.planner.fake_engine import balanced_experts, fake_channels
from colossus.planner.fake_rank import errors_of_model, fake_rank, gathered_parameters, give_sizes
from colossus.planner.fake_tensors import CountedFakeTensors, counted_fake_tensors
from colossus.planner.optimizer_memory import OptimizerMemory
from colossus.planner.parameter_facts import ModelFacts, facts_of
from colossus.planner.recorded_memory import BackwardLevels, LastingBytes, LastingWeights, Level
from colossus.planner.sample_batch import counted_of, repeated, sample_of
from colossus.planner.trace import Trace
from colossus.planner.trace_recorder import RecordedDeferral, TraceRecorder
from colossus.registry import MODELS
from colossus.schedule.transport import TensorSpec, ValueSpec, flatten_value


@dataclass(eq=False)
class BlockProfile:
    """One block of the model for one microbatch, on one rank. Equal blocks share a profile.

    Attributes:
        forward, backward: traces; a backward includes its recomputation.
        saved: bytes from its forward to its backward, its output included.
        forward_peak: the most bytes while its forward runs, beyond those that the blocks before it save.
        output: description of its output; None for the last block.
        lasting: bytes for all microbatches of a step; they are in no other bytes.
        levels: levels of ``backward``, activations beyond those that this block and the blocks before it save.
        wgrad: trace of the part of backward that a schedule may run later; None if the backward is not split.
        deferred: bytes that are alive from the end of backward to ``wgrad``; None if the backward is not split.
        wgrad_levels: levels of ``wgrad``, activations beyond ``deferred``.
    """

    forward: Trace
    saved: int
    forward_peak: int
    output: ValueSpec | None
    lasting: LastingBytes
    backward: Trace = field(default_factory=Trace)
    levels: Sequence[Level] = ()
    wgrad: Trace | None = None
    deferred: int | None = None
    wgrad_levels: Sequence[Level] = ()

    @cached_property
    def passed(self) -> int:
        """Return the bytes of its output."""
        return 0 if self.output is None else _bytes_of(self.output.tensors)

    @cached_property
    def passed_back(self) -> int:
        """Return the bytes of the gradient of its output."""
        return 0 if self.output is None else _bytes_of(self.output.differentiable)


def _bytes_of(tensors: Sequence[TensorSpec]) -> int:
    return sum(tensor.shape.numel() * tensor.dtype.itemsize for tensor in tensors)


@dataclass(frozen=True, eq=False)
class LayoutProfile:
    """The profile of a model.

    Attributes:
        blocks: all blocks in order; a model that is no chain is one block.
        facts: facts of the model's parameters.
        optimizer: memory of the optimizer.
        tokens: tokens of a sample, or what else the loss counts.
        sample: a batch of one sample of the data.
    """

    blocks: Sequence[BlockProfile]
    facts: ModelFacts
    optimizer: OptimizerMemory
    tokens: int
    sample: Any


def profile_layout(
    config: Config,
    *,
    split_backward: bool = False,
    is_sharded: bool = False,
    on_cpu: bool = False,
    other: LayoutProfile | None = None,
) -> LayoutProfile:
    """Run a microbatch of a config through its model, on fake tensors, and return the profile.

    Args:
        config: the resolved config with the layout's sizes, one pipeline rank and one microbatch.
        split_backward: whether dgrad and wgrad are recorded apart.
        is_sharded: whether the plan stores parameters apart from those that compute sees (`PlanAxes.stage`),
            which then have the dtype of compute.
        on_cpu: whether ranks compute on CPU, where experts are multiplied one after the other.
        other: profile of another layout of the same model and data; facts that do not depend on the layout are copied.

    Raises:
        ConfigError: the config has no model or data, they cannot be built or read, or sizes depend on a batch's values.
    """
    try:
        with errors_of_model(config), fake_rank(config) as context:
            return _profile(config, context, split_backward, is_sharded, on_cpu, other)
    except ConfigError:
        raise
    except Exception as error:  # raised by the model's own code
        assert config.model is not None
        add_place(error)
        words = "\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())])
        raise ConfigError(f"{name_of(config.model.type)} raises {words}", config.source) from error


def _profile(
    config: Config,
    context: ParallelContext,
    split_backward: bool,
    is_sharded: bool,
    on_cpu: bool,
    other: LayoutProfile | None,
) -> LayoutProfile:
    config, more = shallow(config)
    spec = config.model.spec()  # type: ignore[union-attr]
    factory = with_activation_checkpoint(lambda: MODELS.build(spec), config.train.activation_checkpoint)

    groups: list[ParameterGroups | None] = []

    def prepare(whole: nn.Module) -> None:
        groups.append(make_groups(config.optimizer, whole))  # freezes parameters

    model = build(factory, context, materialize=False, prepare=prepare)
    sample = sample_of(config) if other is None else other.sample
    batch = repeated(sample, config.train.global_batch_size // (config.parallel.data or 1))
    chained = is_chain(model) and not has_hooks(model)
    whole = NamedBlock("", model, (), tuple(dict(model.named_parameters())), tuple(dict(model.named_buffers())))
    blocks = pipeline_blocks(model) if chained else [whole]
    runs = runs_of(model, blocks)
    names = unused(runs)
    with (
        counted_fake_tensors() as fake,
        balanced_experts(on_cpu=on_cpu),
        fake_channels(fake) if on_cpu else nullcontext(),
    ):
        give_sizes(model, context.precision, lambda name: name not in names)
        run = _MicrobatchRun(model, batch, config, context, fake, split_backward, on_cpu)
        with gathered_parameters(model, context.precision) if is_sharded else nullcontext():
            profiles = iter(run.of([block.call for shown, _ in runs for block in shown]))
        share_gradient_axes(model, runs)
        facts = facts_of(model, context, blocks, groups[0], is_chain=chained)
    all_blocks: list[BlockProfile] = []
    for shown, left_out in runs:
        all_blocks += [next(profiles) for _ in shown]
        all_blocks += all_blocks[-1:] * len(left_out)
    if more:
        facts = with_more_layers(facts, more)
        all_blocks[-1:-1] = [all_blocks[-2]] * more
    optimizer = OptimizerMemory(config, groups[0]) if other is None else other.optimizer
    are_pairs = getattr(model_options(config), "counted", "tokens") == "pairs"
    return LayoutProfile(all_blocks, facts, optimizer, 1 if are_pairs else counted_of(sample), sample)


class _MicrobatchRun:
    """Forward and backward of one microbatch. Hooks on the outputs of blocks tell where a block's backward ends."""

    def __init__(
        self,
        model: nn.Module,
        batch: Any,
        config: Config,
        context: ParallelContext,
        fake: CountedFakeTensors,
        split_backward: bool,
        on_cpu: bool,
    ) -> None:
        self._model, self._on_cpu = model, on_cpu
        self._inputs = Inputs(context, context.precision.data, pad=config.parallel.sequence.pad)
        fake_batch = map_batch(lambda x: torch.empty(x.shape, dtype=x.dtype), batch)
        self._batch = self._inputs.split(fake_batch, 1)
        self._first = ForwardCall(model, is_partitioned=is_chain(model) and not has_hooks(model))
        self._loss_fn, self._context, self._fake, self._split = loss_of(model, None), context, fake, split_backward
        self._parallel = model_parallel_of(context)
        self._recorder = TraceRecorder(context)
        self._weights = LastingWeights(self._parallel.weights, self._recorder, fake)
        model.train()
        context.rng.move_to(0, 0)

    def of(self, calls: Sequence[Callable[[Any], Any]]) -> list[BlockProfile]:
        """Run the microbatch through these blocks, and return their profiles."""
        fake = self._fake
        self._blocks: list[BlockProfile] = []
        #: bytes that are alive at the end of each block's forward, and the deferred wgrads by then of its backward
        self._live: list[int] = []
        self._deferrals: dict[int, int] = {}
        self._levels = BackwardLevels(fake, self._recorder, self._weights.summed)
        deferral = self._parallel.weights.deferral
        weights = self._parallel.weights
        mode: Any = nullcontext()
        if self._split:  # the host of a GPU runs ahead
            mode = RecordedDeferral(weights, self._recorder) if self._on_cpu else DeferredWgrad(weights)
        with (
            self._recorder.recording(fake),
            self._parallel.batch(self._batch.infos[0]),
            self._weights.in_a_step(),
            mode,
        ):
            loss = self._forward(calls)
            self._levels.begin(self._live[-1])
            tasks: AbstractContextManager[list[Any]] = deferral.deferred() if self._split else nullcontext([])
            with tasks as self._tasks, self._levels.of(self._model, deferral):
                torch.autograd.backward([get_gradient_edge(loss)])  # a tensor instead would turn off the mode
            self._end_backward(0)
            if self._split:
                self._run_wgrads()
            self._tasks = []  # they refer to the graph, and its hooks to this object
        return self._blocks

    def _forward(self, calls: Sequence[Callable[[Any], Any]]) -> Tensor:
        fake = self._fake
        own = self._inputs.local(self._batch.microbatches[0])
        with self._context.precision.autocast(self._context.device):
            value = self._inputs.mark_tokens(model_input(own), self._batch.microbatches[0])
            live, aside = fake.mark(), fake.aside
            self._recorder.take()
            for number, call in enumerate(calls):
                value = self._first(call, value, own) if number == 0 else call(value)
                output = self._pass_on(number, value) if number + 1 < len(calls) else None
                if output is None:
                    labels, _ = self._inputs.for_loss(value, own, self._batch.microbatches[0])
                    value = self._loss_fn(value, labels)[0]
                saved, peak, lasting = fake.live - live, fake.peak - live, LastingBytes(fake.aside - aside)
                live, aside = fake.mark(), fake.aside
                self._live.append(live)
                block = BlockProfile(self._recorder.take(), saved, peak, output, lasting)
                block.deferred = 0 if self._split else None
                self._blocks.append(block)
        return value

    def _pass_on(self, number: int, value: Any) -> ValueSpec:
        """Return the description of a block's output; a hook on the output ends the next backward."""
        leaves = [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor) and leaf.requires_grad]
        with torch._C.DisableTorchFunctionSubclass():
            for leaf in leaves[:1]:
                leaf.register_hook(lambda gradient: self._end_backward(number + 1))
        return flatten_value(value, self._parallel, f"block {number}")[0]

    def _end_backward(self, number: int) -> None:
        """Record the backward of a block, and of blocks after it whose end no hook has seen."""
        block, behind = self._blocks[number], self._blocks[number + 1 :]
        block.backward, self._deferrals[number] = self._recorder.take(), len(self._tasks)
        block.levels = self._levels.take()
        block.lasting = replace(self._weights.take(), weights=block.lasting.weights)
        deferred = sum(other.deferred or 0 for other in behind)
        if self._split:
            block.deferred = max(0, self._levels.live - (self._live[number] - block.saved) - deferred)
            deferred += block.deferred
        if number:
            self._levels.begin(self._live[number - 1] + deferred)

    def _run_wgrads(self) -> None:
        self._recorder.take()
        deferral = self._parallel.weights.deferral
        with torch.no_grad(), self._levels.of(self._model, deferral):
            for number, block in enumerate(self._blocks):
                self._levels.begin(self._levels.live)
                deferral.run(list(self._tasks[self._deferrals.get(number + 1, 0) : self._deferrals.get(number, 0)]))
                block.wgrad_levels = self._levels.take()
                block.lasting = replace(self._weights.take(), weights=block.lasting.weights)
                block.wgrad = self._recorder.take()
