"""A model under one layout, block by block: what a microbatch computes, sends and keeps on a rank.

A layout is what tensor, sequence and expert parallelism, activation checkpointing and the samples of a microbatch
decide. How many replicas and pipeline stages there are changes nothing of it: plans are put together from its blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.autograd.graph import get_gradient_edge
from torch.utils._pytree import tree_leaves

from colossus.config import Config, ConfigError
from colossus.config.plans import name_of
from colossus.construct.build_model import build
from colossus.context.parallel_context import ParallelContext
from colossus.data.batch import batch_size_of, map_batch
from colossus.data.make_loaders import loaders_of
from colossus.engine.checkpointed_modules import with_activation_checkpoint
from colossus.engine.inputs import ForwardCall, Inputs, model_input
from colossus.engine.loss_function import loss_of
from colossus.engine.parameter_groups import ParameterGroups, make_groups
from colossus.error_place import add_place
from colossus.layers.deferred_wgrad import DeferredWgrad
from colossus.layers.model_parallel import model_parallel_of
from colossus.layers.pipeline_block import NamedBlock, has_hooks, is_chain, pipeline_blocks
from colossus.layout.parameter import spec_of
from colossus.planner.balanced_experts import balanced_experts
from colossus.planner.block_runs import BlockRun, runs_of
from colossus.planner.fake_rank import fake_rank, give_sizes
from colossus.planner.fake_tensors import CountedFakeTensors, counted_fake_tensors
from colossus.planner.layout_blocks import BlockProfile, LayoutProfile
from colossus.planner.optimizer_memory import OptimizerMemory
from colossus.planner.parameter_facts import facts_of
from colossus.planner.shallow import shallow, with_more_layers
from colossus.planner.trace import Trace
from colossus.planner.trace_recorder import TraceRecorder
from colossus.registry import MODELS
from colossus.schedule.transport import flatten_value
from colossus.tensor_parallel.dtypes import gradient_dtype


def profile_layout(
    config: Config, *, split_backward: bool = False, other: LayoutProfile | None = None
) -> LayoutProfile:
    """Run a microbatch of a config through its model, on fake tensors.

    Args:
        config: resolved, with the layout's sizes; one pipeline rank, one microbatch.
        split_backward: whether dgrad and wgrad are told apart.
        other: another layout of the same model and data, of which what does not depend on the layout is taken.

    Raises:
        ConfigError: for a config without a model or data, and for what cannot be built or read, or has sizes that
            depend on a batch's values.
    """
    if config.model is None or config.data is None:
        missing = "model" if config.model is None else "data"
        raise ConfigError(f"{missing}: the config has none, and what a plan costs depends on it", config.source)
    try:
        with fake_rank(config) as context:
            return _profile(config, context, split_backward, other)
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(str(error), config.source) from error
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise ConfigError(
            f"what {name_of(config.model.type)} costs cannot be predicted: sizes of its tensors depend on the values "
            f"of a batch ({error})",
            config.source,
        ) from error
    except Exception as error:  # of a model's own code
        add_place(error)
        words = "\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())])
        raise ConfigError(f"{name_of(config.model.type)} raises {words}", config.source) from error


def sample_of(config: Config) -> Any:
    """A batch of one sample, whose numbers count for nothing."""
    train = config.train.model_copy(update={"global_batch_size": 1, "batch_ramp": None})
    one = config.model_copy(update={"train": train})
    batch = next(iter(loaders_of(one, config.data, data_rank=0, data_size=1, device="cpu").train))
    read = batch_size_of(batch)
    return map_batch(lambda x: x[:1] if x.dim() and len(x) == read else x, batch)


def repeated(sample: Any, size: int) -> Any:
    """A batch of so many equal samples."""
    return map_batch(lambda x: x.expand(size, *x.shape[1:]) if x.dim() and len(x) == 1 else x, sample)


def _profile(
    config: Config, context: ParallelContext, split_backward: bool, other: LayoutProfile | None
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
    blocks = pipeline_blocks(model) if chained else []
    runs = runs_of(model, blocks) if chained else [BlockRun(None, [model], ())]
    unused = _unused(runs, blocks)
    with counted_fake_tensors() as fake, balanced_experts():
        give_sizes(model, context.precision, lambda name: name not in unused)
        for name, param in model.named_parameters():
            if param.requires_grad and name not in unused:
                param.grad = torch.empty(param.shape, dtype=gradient_dtype(param))
        run = _MicrobatchRun(model, batch, config, context, fake, split_backward)
        profiles = run.of(runs)
        _share_gradient_axes(model, runs, blocks)
        facts = facts_of(model, context, blocks if chained else None, groups[0])
    each: list[BlockProfile] = []
    for of_run, these in zip(runs, profiles, strict=True):
        each += [*these, *[these[-1]] * len(of_run.left_out)]
    if more:
        facts = with_more_layers(facts, more)
        each[-1:-1] = [each[-2]] * more
    optimizer = OptimizerMemory(config, groups[0]) if other is None else other.optimizer
    return LayoutProfile(each, facts, optimizer, counted_of(sample), sample)


def _unused(runs: Sequence[BlockRun], blocks: Sequence[NamedBlock]) -> set[str]:
    """The parameters and buffers of blocks that are not run."""
    left_out = [block for run in runs for block in run.left_out]
    shown = [block for block in blocks if not any(block is other for other in left_out)]
    unused, used = ({name for each in of for name in (*each.parameters, *each.buffers)} for of in (left_out, shown))
    return unused - used


def _share_gradient_axes(model: nn.Module, runs: Sequence[BlockRun], blocks: Sequence[NamedBlock]) -> None:
    """What layers note of gradients in their first forward, those of blocks that are not run have of their like."""
    params, stop = dict(model.named_parameters(remove_duplicate=False)), 0
    for run in runs if blocks else ():
        like, stop = blocks[stop + len(run.shown) - 1], stop + len(run.shown) + len(run.left_out)
        for block in run.left_out:
            for name, other in zip(block.parameters, like.parameters, strict=True):
                axes = spec_of(params[other]).gradient_axes
                if axes is not None:
                    spec_of(params[name]).record(axes)


def counted_of(batch: Any) -> int:
    """What the loss counts of a sample, as far as a batch shows it: its labels, or its one tensor."""
    labels = batch["labels"] if isinstance(batch, dict) and "labels" in batch else None
    if labels is None:
        found = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.dim()]
        labels = found[-1]
    return 1 if labels.is_floating_point() else labels[0].numel()


@dataclass
class _Begun:
    """A block whose forward has run."""

    forward: Trace
    kept: int
    forward_peak: int
    passed: int
    passed_back: int
    #: bytes that are live at the end of its forward
    live: int
    backward: Trace = field(default_factory=Trace)
    backward_peak: int = 0
    #: of the deferred weight gradients, the number that there are at the end of its backward
    tasks: int = 0
    #: bytes that these hold, and that they need on top at most
    deferred: int = 0
    wgrad_peak: int = 0


class _MicrobatchRun:
    """Forward and backward of one microbatch, the ends of blocks seen by hooks on what they pass on."""

    def __init__(
        self,
        model: nn.Module,
        batch: Any,
        config: Config,
        context: ParallelContext,
        fake: CountedFakeTensors,
        split_backward: bool,
    ) -> None:
        self._inputs = Inputs(context, context.precision.data, pad=config.parallel.sequence.pad)
        given = map_batch(lambda x: torch.empty(x.shape, dtype=x.dtype), batch)
        self._batch = self._inputs.split(given, 1)
        self._first = ForwardCall(model, is_partitioned=is_chain(model) and not has_hooks(model))
        self._loss_fn, self._context, self._fake, self._split = loss_of(model, None), context, fake, split_backward
        self._parallel = model_parallel_of(context)
        self._recorder = TraceRecorder(context)
        model.train()
        context.rng.move_to(0, 0)

    def of(self, runs: Sequence[BlockRun]) -> list[list[BlockProfile]]:
        """The profiles of the blocks of each run that are shown."""
        fake = self._fake
        self._begun: list[_Begun] = []
        deferral = self._parallel.weights.deferral
        mode: AbstractContextManager[Any] = DeferredWgrad(self._parallel.weights) if self._split else nullcontext()
        with self._recorder.recording(fake), self._parallel.batch(self._batch.info), self._in_a_step(), mode:
            loss = self._forward(runs)
            fake.mark()
            tasks: AbstractContextManager[list[Any]] = deferral.deferred() if self._split else nullcontext([])
            with tasks as self._tasks:
                torch.autograd.backward([get_gradient_edge(loss)])  # given a tensor it would turn off the mode
            self._ended(0)
            wgrads = self._wgrads()
            self._tasks = []  # which hold the graph whose hooks hold this object
        profiles = iter([
            BlockProfile(
                b.forward, b.backward, wgrad, b.deferred if self._split else None, b.wgrad_peak, b.kept, b.forward_peak,
                b.backward_peak, b.passed, b.passed_back,
            )
            for b, wgrad in zip(self._begun, wgrads, strict=True)
        ])  # fmt: skip
        return [[next(profiles) for _ in run.shown] for run in runs]

    @contextmanager
    def _in_a_step(self) -> Iterator[None]:
        """As the last microbatch of a step: what moves weights and their gradients once in a step, does."""
        weights, recorder = self._parallel.weights, self._recorder
        if weights.scope != "step":
            yield
            return
        gather, reduce = weights.gather, weights.reduce

        def once(move: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any) -> Any:
                with recorder.once():
                    return move(*args)

            return call

        weights.begin_step()
        weights.set_last_microbatch()
        with patch.object(weights, "gather", once(gather)), patch.object(weights, "reduce", once(reduce)):
            yield
        weights.end_step()

    def _forward(self, runs: Sequence[BlockRun]) -> Tensor:
        fake, calls = self._fake, [call for run in runs for call in run.shown]
        own = self._inputs.local(self._batch.microbatches[0])
        with self._context.precision.autocast(self._context.device):
            value = self._inputs.mark_tokens(model_input(own), self._batch.microbatches[0])
            live = fake.mark()
            self._recorder.take()
            for number, call in enumerate(calls):
                value = self._first(call, value, own) if number == 0 else call(value)
                passed = back = 0
                if number + 1 < len(calls):
                    passed, back = self._pass_on(number, value)
                else:
                    of_batch, _ = self._inputs.for_loss(value, own, self._batch.microbatches[0])
                    value = self._loss_fn(value, of_batch)[0]
                kept, peak = fake.live - live, fake.peak - live
                live = fake.mark()
                self._begun.append(_Begun(self._recorder.take(), kept, peak, passed, back, live))
        return value

    def _pass_on(self, number: int, value: Any) -> tuple[int, int]:
        """The bytes of what a block passes on, and of those that get a gradient; a hook tells when they have it."""
        spec, tensors = flatten_value(value, self._parallel, f"block {number}")
        leaves = [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor) and leaf.requires_grad]
        with torch._C.DisableTorchFunctionSubclass():
            for leaf in leaves[:1]:
                leaf.register_hook(lambda gradient: self._ended(number + 1))
        back = sum(x.shape.numel() * x.dtype.itemsize for x in spec.differentiable)
        return sum(tensor.nbytes for tensor in tensors), back

    def _ended(self, number: int) -> None:
        """The backward of a block, and of those behind it that have not been seen to end, is over."""
        block = self._begun[number]
        block.backward, block.tasks = self._recorder.take(), len(self._tasks)
        deferred = sum(behind.deferred for behind in self._begun[number + 1 :])
        block.backward_peak = max(0, self._fake.peak - block.live - deferred)
        if self._split:
            block.deferred = max(0, self._fake.live - (block.live - block.kept) - deferred)
        self._fake.mark()

    def _wgrads(self) -> list[Trace | None]:
        if not self._split:
            return [None] * len(self._begun)
        found: list[Trace | None] = []
        self._recorder.take()
        with torch.no_grad():
            for block, behind in zip(self._begun, [*self._begun[1:], None], strict=True):
                before = self._fake.mark()
                self._parallel.weights.deferral.run(list(self._tasks[behind.tasks if behind else 0 : block.tasks]))
                block.wgrad_peak = self._fake.peak - before
                found.append(self._recorder.take())
        return found
