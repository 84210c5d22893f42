"""Inputs of the model: the microbatches of a step, and this rank's part of each."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from colossus.comm.host_transfer import send_to
from colossus.comm.objects import all_gather_object
from colossus.context.parallel_context import ParallelContext
from colossus.data.batch import (
    Microbatches,
    SampleDims,
    WholeEntry,
    batch_size_of,
    map_batch,
    repeat_batch,
    shard_of_batch,
    slice_batch,
    split_microbatches,
)
from colossus.data.model_input import INPUTS, model_input, names_arguments, sequence_length
from colossus.data.padding import with_size
from colossus.engine.consistency import fingerprint
from colossus.layers.model_parallel import BatchInfo, model_parallel_of
from colossus.nest import leaves, tensors
from colossus.registry import TENSOR_MODES
from colossus.sequence_parallel.split import SequenceSplit
from colossus.sharded_tensor.placement import Place
from colossus.sharded_tensor.regions import sequence_place, with_sequence

_NOT_BY_NAME = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.VAR_POSITIONAL)


@dataclass(frozen=True, eq=False)
class StepBatch:
    """The batch of a data rank, ready for one step or one evaluation.

    Attributes:
        whole: the batch as it was passed in, the same on all ranks of a model.
        microbatches: its microbatches, of one shape unless they are `Microbatches`.
        infos: facts that layers may need about each.
    """

    whole: Any
    microbatches: Sequence[Any]
    infos: Sequence[BatchInfo]

    @cached_property
    def fingerprint(self) -> int:
        """Hash of the batch."""
        return fingerprint(self.whole)


_FIRST = SampleDims()


class Inputs:
    """The conversion of a data rank's batches to the inputs of this rank's model.

    Args:
        context: the rank's context.
        dtype: precision of the run.
        pad: whether sequences that do not divide over the sequence ranks are padded.
        dims: dims of samples in entries of a batch. Inside of this class they are dim 0, until `local`.
    """

    def __init__(
        self, context: ParallelContext, dtype: torch.dtype, *, pad: bool = False, dims: SampleDims = _FIRST
    ) -> None:
        self._context, self._dtype, self._pad, self.dims = context, dtype, pad, dims
        self._sequence = model_parallel_of(context).sequence
        #: divisor of the samples of a microbatch
        mode = TENSOR_MODES.get(context.options.tensor_mode)
        self._ways = mode.batch_ways(context.grid.sizes) if context.size("tensor") > 1 else 1

    def split(self, batch: Any, num_microbatches: int) -> StepBatch:
        """Return a batch with the samples in dim 0 split into microbatches, with facts that layers may need.

        `Microbatches` stay as they are, whatever their number.

        Raises:
            ValueError: if the samples do not divide, or there are no tokens to split over the sequence ranks.
        """
        interleaved = model_parallel_of(self._context).interleaves_microbatches
        if isinstance(batch, Microbatches):
            if interleaved:
                raise ValueError(
                    "a layer of the model mixes the samples of a microbatch (a batch norm), but "
                    "train.tokens_per_microbatch gives each plan other microbatches: cut a step by "
                    "schedule.microbatches"
                )
            infos = [self._info(part, samples) for part, samples in zip(*batch, strict=True)]
            return StepBatch(batch, batch.batches, infos)
        microbatches = split_microbatches(batch, num_microbatches, interleaved=interleaved)
        size = batch_size_of(batch)
        info = BatchInfo(
            num_tokens=sequence_length(batch) if self._sequence is not None else None,
            microbatch_size=size // num_microbatches,
            first_sample=self._context.index("data") * size,
            sample_step=num_microbatches if interleaved else 1,
        )
        return StepBatch(batch, microbatches, [info] * num_microbatches)

    def _info(self, microbatch: Any, samples: Tensor) -> BatchInfo:
        num_tokens = sequence_length(microbatch) if self._sequence is not None else None
        return BatchInfo(num_tokens=num_tokens, microbatch_size=len(samples), sample_numbers=samples)

    def stand_in(self, batch: Any) -> StepBatch:
        """Return a batch of the same kind with the fewest samples, all zeros, for a forward that others wait for."""
        return self.split(map_batch(lambda x: x.new_zeros((self._ways, *x.shape[1:])), batch), 1)

    def split_evenly(self, batch: Any, max_microbatches: int) -> Iterator[tuple[StepBatch, float]]:
        """Yield batches that divide, from a batch of any size for evaluation, and how often each repeats its samples.

        The rest that does not divide over the ranks which split a batch is a batch of its own, repeated until it
        divides: its sums must be divided by the number of repetitions. Each batch has as many microbatches as possible,
        up to ``max_microbatches``; under ``train.reproducible`` each has one sample, as in a step.
        """
        ways, size = self._ways, batch_size_of(batch)
        if self._context.options.reproducible:
            yield from ((self.split(slice_batch(batch, sample, sample + 1), 1), 1.0) for sample in range(size))
            return
        whole = size - size % ways
        for start, stop in ((0, whole), (whole, size)):
            if start == stop:
                continue
            times = ways // math.gcd(stop - start, ways)
            part = batch if stop - start == size else slice_batch(batch, start, stop)
            num_samples = (stop - start) * times // ways
            most = next(n for n in range(max_microbatches, 0, -1) if num_samples % n == 0)
            yield self.split(repeat_batch(part, times), most), times

    def in_one(self, batch: Any) -> list[tuple[StepBatch, float]]:
        """Return a batch of an evaluation in which samples interact as one microbatch, in the form of `split_evenly`.

        It is empty without samples. Collective over data.

        Raises:
            ValueError: on all data ranks, if they have different numbers of samples, or these do not divide.
        """
        sizes = all_gather_object(batch_size_of(batch), self._context.group("data"))
        if min(sizes) < max(sizes) or sizes[0] % self._ways:
            raise ValueError(
                f"train.samples_interact: an evaluation needs as many samples on each data rank, which divide by "
                f"{self._ways}, but a batch has {sizes}: choose train.eval_batch_size, train.eval_batches and the "
                f"number of validation samples so that no batch is smaller"
            )
        return [(self.split(batch, 1), 1.0)] if sizes[0] else []

    def local(self, microbatch: Any) -> Any:
        """Return the samples and tokens of a microbatch that this rank's model takes, in the precision of the run.

        Floating-point tensors are cast. Tensors on the host are copied to the rank's device, without waiting.

        Raises:
            ValueError: if samples or tokens do not divide.
        """
        samples = self._local_samples(microbatch)
        if self._sequence is not None:
            samples = _local_tokens(samples, self._sequence, self._pad)
        return self._with_own_dims(samples)

    def local_samples(self, microbatch: Any) -> Any:
        """Return the samples of `local` with all their tokens."""
        return self._with_own_dims(self._local_samples(microbatch))

    def _with_own_dims(self, samples: Any) -> Any:
        return map_batch(self._placed, self.dims.restored(samples)) if self.dims.dims else samples

    def _placed(self, x: Tensor) -> Tensor:
        """Return a tensor on this rank's device, in the precision of the run."""
        if self._context.device.type != "cpu" and x.device.type == "cpu":  # passed by a user's own loop
            x = send_to(self._context.device, x)
        return x.to(self._dtype) if x.is_floating_point() else x

    def _local_samples(self, microbatch: Any) -> Any:
        if axes := batch_axes(self._context):
            microbatch = shard_of_batch(microbatch, self._context.index(axes), self._context.size(axes))
        return map_batch(self._placed, microbatch)

    def mark_tokens(self, value: Any, microbatch: Any) -> Any:
        """Return the model's input with tensors that have a part of the tokens as `ShardedTensor`."""
        return value if self._sequence is None else self._marked(value, model_input(microbatch), microbatch)

    def for_loss(self, outputs: Any, local: Any, microbatch: Any) -> tuple[Any, int]:
        """Return a rank's part of a microbatch for the loss function, and the number of ranks with the same loss.

        If the outputs have a part of the tokens, so has the microbatch, and the loss is that of all tokens. Both are
        plain if the model has made its outputs plain (`colossus.layers.local`), and handles tokens itself.
        """
        if self._sequence is None or not any(map(sequence_place, tree_leaves(outputs))):
            return local, 1
        return self._marked(local, microbatch, microbatch), self._sequence.num_shards

    def _marked(self, value: Any, whole: Any, microbatch: Any) -> Any:
        parallel, num_tokens = model_parallel_of(self._context), sequence_length(microbatch)
        places: list[Place | None] = []
        for path, x in leaves(whole):
            if isinstance(x, Tensor):
                dim = self.dims.token_dim(path.rpartition("['")[2][:-2])
                places.append(Place(dim) if _has_tokens(x, num_tokens) else None)
            elif isinstance(x, WholeEntry):
                places += [None for _ in tensors(x.value)]
        place_of = iter(places)
        return map_batch(lambda x: with_sequence(x, next(place_of), parallel), value)


def batch_axes(context: ParallelContext) -> tuple[str, ...]:
    """Return the axes beside data that split the samples of a batch: tensor axes of 2D, 2.5D and 3D."""
    return tuple(
        axis for axis in model_parallel_of(context).regions.whole.batch if axis not in context.grid.axes("data")
    )


class ForwardCall:
    """The call of a model's forward, or of its first pipeline blocks, with the result of `model_input`.

    A dict without "inputs" is keyword arguments. Entries that the forward does not take are for the loss function.
    """

    def __init__(self, model: nn.Module, *, is_partitioned: bool) -> None:
        self._title, self._is_partitioned = type(model).__name__, is_partitioned
        #: whether the blocks take all arguments, as those of an unchanged model do
        self._blocks_take_names = getattr(getattr(model, "pipeline_blocks", None), "takes_names", False)
        parameters = inspect.signature(model.forward).parameters.values()
        self._takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
        self._names = [parameter.name for parameter in parameters if parameter.kind not in _NOT_BY_NAME]

    def __call__(self, forward: Callable[..., Any], value: Any, batch: Any) -> Any:
        """Return the output for the input of a batch.

        Raises:
            ValueError: if none of a batch's keys is an argument, or several are and the blocks take one input.
        """
        if not names_arguments(batch):
            return forward(value)
        arguments = value if self._takes_any else {name: value[name] for name in self._names if name in value}
        if not arguments:
            raise ValueError(
                f"a batch that is a dict without the key {INPUTS!r} is the model's keyword arguments, but the forward "
                f"of {self._title} takes {', '.join(self._names)}, and the batch has {', '.join(sorted(batch))}: "
                f"rename its keys, or put the model's input under {INPUTS!r}"
            )
        if not self._is_partitioned:
            return forward(**arguments)
        if self._blocks_take_names:
            return forward(arguments)
        if len(arguments) > 1:
            raise ValueError(
                f"the first pipeline block of {self._title} takes one input, but the batch has several arguments of "
                f"its forward ({', '.join(arguments)}): put what the block takes under the key {INPUTS!r}"
            )
        return forward(*arguments.values())


def _has_tokens(x: Tensor, num_tokens: int) -> bool:
    return x.dim() > 1 and x.shape[1] == num_tokens


def _local_tokens(batch: Any, sequence: SequenceSplit, pad: bool) -> Any:
    """Return a batch with this rank's tokens of every tensor whose dim 1 is as long as the sequence.

    Padded sequences have 0 in inputs, and -100, which losses ignore, in other integers (labels); see `with_size`.
    """
    num_tokens = sequence_length(batch)
    are_split = iter([_has_tokens(x, num_tokens) for _, x in tensors(batch)])
    if pad:
        batch = with_size(batch, num_tokens, sequence.padded_length(num_tokens), 1)
    return map_batch(lambda x: sequence.local_shard(x) if next(are_split) else x, batch)
