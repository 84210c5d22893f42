"""The common state of a model's layers: layouts, shardings and weights of their context, and the batch's facts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from colossus.context.parallel_context import ParallelContext, current_context
from colossus.layers.kv_cache import KeyValueCache
from colossus.layout.activation import Activation
from colossus.registry import TENSOR_MODES
from colossus.sequence_parallel.split import SequenceSplit
from colossus.sharded_tensor.placement import Placement, placement_of
from colossus.sharded_tensor.regions import moved
from colossus.tensor_parallel.choose_sharding import Shardings
from colossus.tensor_parallel.gathered_weights import GatheredWeights
from colossus.tensor_parallel.mode import Regions, TensorMode


@dataclass(frozen=True)
class BatchInfo:
    """Facts about a microbatch of a step or an evaluation, the same on every stage of a pipeline.

    Attributes:
        num_tokens: length of its sequences without padding, where tokens are split over the sequence axis; None where
            they are not, and for a layer that is called outside the engine: then the length follows from the ranks'
            tokens.
        microbatch_size: samples of a microbatch of this data rank; 0 outside the engine.
        first_sample: number in the global batch of the first sample of this data rank.
        sample_step: distance between samples of a microbatch in the batch: the number of microbatches if they are
            interleaved.
        sample_numbers: numbers in the global batch of the samples of this microbatch, [microbatch_size]; None where
            they follow from ``first_sample`` and ``sample_step``.
        cache: for a model that decodes: its tokens follow those in the cache.
        only_last_token: the model may leave out all logits except those of the last token of each sample.
        loss_scale: factor of losses before their backward; None: no factor.
    """

    num_tokens: int | None = None
    microbatch_size: int = 0
    first_sample: int = 0
    sample_step: int = 1
    sample_numbers: Tensor | None = None
    cache: KeyValueCache | None = None
    only_last_token: bool = False
    loss_scale: Tensor | None = None


class RotaryTable(NamedTuple):
    """Cosines and sines [tokens, head_dim] at ``positions`` [tokens] (None: at 0, 1, 2, ...).

    ``rows`` are those of the last ``span``, (start, number).
    """

    cos: Tensor
    sin: Tensor
    positions: Tensor | None
    span: tuple[int, int] = (0, -1)
    rows: tuple[Tensor, Tensor] = ()  # type: ignore[assignment]


@dataclass(eq=False)
class ModelParallel:
    """The way in which a context splits a model's tensors; axes of one rank are left out.

    Attributes:
        mode: the tensor mode.
        regions: the layouts of activations.
        shardings: None without tensor parallelism.
        weights: gathers the weights of all layers, and reduces their gradients.
        sequence: the split of tokens over the sequence axis; None if there is none.
        batch_info: facts about the current microbatch (see `batch`); an empty one outside a step.
        replicas_differ: data ranks train parameters of their own: layers exchange nothing with other data ranks.
        interleaves_microbatches: a layer mixes the samples of a microbatch, so that these must be the same under any
            number of data ranks (`colossus.data.batch.split_microbatches`).
        samples_interact: ``train.samples_interact``.
        adapters_off: adapters add nothing in the current forward, that of a reference without them.
        rotary_tables: (kind, dtype, device) -> the table of `colossus.layers.rotary.Rotary`.
        whole_placement: the placement of plain tensors.
    """

    context: ParallelContext
    mode: type[TensorMode]
    regions: Regions
    shardings: Shardings | None
    weights: GatheredWeights
    sequence: SequenceSplit | None
    batch_info: BatchInfo = BatchInfo()
    replicas_differ: bool = False
    interleaves_microbatches: bool = False
    samples_interact: bool = False
    adapters_off: bool = False
    rotary_tables: dict[tuple[str, torch.dtype, torch.device], RotaryTable] = field(default_factory=dict)
    whole_placement: Placement = field(init=False)

    def __post_init__(self) -> None:
        self.whole_placement = Placement(self, self.regions.whole, self.regions.whole)

    @contextmanager
    def batch(self, info: BatchInfo) -> Iterator[None]:
        """Set ``batch_info`` for all forwards and backwards of a batch inside the context.

        It is a plain attribute and not a context variable: on CUDA, autograd recomputes checkpointed layers on threads
        of its own.
        """
        outer, self.batch_info = self.batch_info, info
        try:
            yield
        finally:
            self.batch_info = outer

    @property
    def sizes(self) -> Mapping[str, int]:
        return self.context.grid.sizes

    @property
    def sample_axes(self) -> tuple[str, ...]:
        """The axes that split the samples of a microbatch, outermost first: data, and those of 2D, 2.5D and 3D.

        Replicas with parameters of their own also have samples of their own.
        """
        axes = self.regions.whole.batch
        own = self.context.grid.axes("data") if self.replicas_differ else ()
        return tuple(axis for axis in axes if axis not in own)

    def __deepcopy__(self, memo: dict[int, Any]) -> ModelParallel:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return model_parallel_of, (self.context,)


def model_parallel_of(context: ParallelContext) -> ModelParallel:
    """Return the `ModelParallel` of a context, made once; a copy of the context gets its own."""
    parallel: ModelParallel | None = vars(context).get("model_parallel")
    if parallel is None or parallel.context is not context:
        parallel = vars(context)["model_parallel"] = _model_parallel(context)
    return parallel


def _model_parallel(context: ParallelContext) -> ModelParallel:
    options = context.options
    mode: type[TensorMode] = TENSOR_MODES.get(options.tensor_mode)
    sizes = context.grid.sizes

    def nontrivial(axes: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(axis for axis in axes if sizes[axis] > 1)

    inputs = Activation(batch=nontrivial(context.grid.axes("data")), tokens=nontrivial(context.grid.axes("sequence")))
    weights = GatheredWeights(options.weight_scope, precision=context.precision)
    sequence = SequenceSplit(context) if context.size("sequence") > 1 else None
    if context.size("tensor") == 1:
        return ModelParallel(context, mode, Regions(inputs, inputs, inputs), None, weights, sequence)
    shardings = Shardings.of(mode, inputs, sizes, sequence_sharded=options.sequence_sharded, keep=options.keep_gathered)
    return ModelParallel(context, mode, shardings.regions, shardings, weights, sequence)


def to_residual(x: Tensor, parallel: ModelParallel | None = None) -> Tensor:
    """Return the activation in the layout between blocks. One call before a stack of blocks saves all their gathers."""
    placement = placement_of(x)
    own = placement.parallel if placement is not None else parallel or model_parallel_of(current_context())
    return moved(x, own.regions.residual, own)
