"""How a batch enters the model: the microbatches of a step, and what this rank's model takes of each."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from colossus.comm.objects import all_gather_object
from colossus.context.parallel_context import ParallelContext
from colossus.data.batch import (
    SampleDims,
    WholeEntry,
    batch_size_of,
    map_batch,
    repeat_batch,
    shard_of_batch,
    slice_batch,
    split_microbatches,
)
from colossus.engine.consistency import fingerprint
from colossus.gradients.host_transfer import send_to
from colossus.layers.model_parallel import BatchInfo, model_parallel_of
from colossus.nest import leaves, tensors
from colossus.registry import TENSOR_MODES
from colossus.sequence_parallel.split import SequenceSplit
from colossus.sharded_tensor.placement import Place
from colossus.sharded_tensor.regions import sequence_place, with_sequence

#: a label that losses ignore
IGNORED = -100
_NOT_BY_NAME = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.VAR_POSITIONAL)


@dataclass(frozen=True, eq=False)
class StepBatch:
    """The batch of a data rank, ready for one step or one evaluation.

    Attributes:
        whole: as it was passed in, the same on all ranks of a model.
        microbatches: of it, equal numbers of samples each.
        info: what layers may ask about it.
    """

    whole: Any
    microbatches: Sequence[Any]
    info: BatchInfo

    @cached_property
    def fingerprint(self) -> int:
        """A number that two different batches hardly share."""
        return fingerprint(self.whole)


_FIRST = SampleDims()


class Inputs:
    """From the batches of a data rank to what the model of this rank is called with.

    Args:
        dtype: precision of the run.
        pad: sequences that do not divide over the sequence ranks are padded.
        dims: which dim of an entry is that of the samples. Here batches have it first, until `local`.
    """

    def __init__(
        self, context: ParallelContext, dtype: torch.dtype, *, pad: bool = False, dims: SampleDims = _FIRST
    ) -> None:
        self._context, self._dtype, self._pad, self.dims = context, dtype, pad, dims
        self._sequence = model_parallel_of(context).sequence
        #: what the samples of a microbatch must be a multiple of
        mode = TENSOR_MODES.get(context.options.tensor_mode)
        self._ways = mode.batch_ways(context.grid.sizes) if context.size("tensor") > 1 else 1

    def split(self, batch: Any, num_microbatches: int) -> StepBatch:
        """A batch, with the samples in dim 0, cut into microbatches, with what layers may ask about it.

        Raises:
            ValueError: when the samples do not divide, or there are no tokens to split over the sequence ranks.
        """
        interleaved = model_parallel_of(self._context).interleaves_microbatches
        microbatches = split_microbatches(batch, num_microbatches, interleaved=interleaved)
        size = batch_size_of(batch)
        info = BatchInfo(
            num_tokens=sequence_length(batch) if self._sequence is not None else None,
            microbatch_size=size // num_microbatches,
            first_sample=self._context.index("data") * size,
            sample_step=num_microbatches if interleaved else 1,
        )
        return StepBatch(batch, microbatches, info)

    def stand_in(self, batch: Any) -> StepBatch:
        """A batch of the same kind, of the fewest samples and all zeros: for a forward that others wait for."""
        return self.split(map_batch(lambda x: x.new_zeros((self._ways, *x.shape[1:])), batch), 1)

    def split_evenly(self, batch: Any, max_microbatches: int) -> Iterator[tuple[StepBatch, float]]:
        """A batch of any size for evaluation: batches that divide, and how often each holds its samples.

        What does not divide over the ranks that split a batch comes in a batch of its own, repeated until it does: its
        sums are to be divided. Each is cut into the largest number of microbatches up to ``max_microbatches``.
        """
        ways, size = self._ways, batch_size_of(batch)
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
        """A batch of an evaluation in which samples look at each other, as one microbatch (none without samples), as
        `split_evenly` gives them. Collective over data.

        Raises:
            ValueError: on all data ranks, when they have different numbers of samples, or these do not divide.
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
        """The samples and tokens of a microbatch that this rank's model takes, in the precision of the run.

        Tensors of floating point are cast. Tensors of the host go to the rank's device, which nobody waits for.

        Raises:
            ValueError: when samples or tokens do not divide.
        """
        samples = self._local_samples(microbatch)
        if self._sequence is not None:
            samples = _local_tokens(samples, self._sequence, self._pad)
        return self._as_given(samples)

    def local_samples(self, microbatch: Any) -> Any:
        """The samples of `local` with all their tokens."""
        return self._as_given(self._local_samples(microbatch))

    def _as_given(self, samples: Any) -> Any:
        return map_batch(self._placed, self.dims.restored(samples)) if self.dims.dims else samples

    def _placed(self, x: Tensor) -> Tensor:
        """A tensor on this rank's device, in the precision of the run."""
        if self._context.device.type != "cpu" and x.device.type == "cpu":  # of a loop of one's own
            x = send_to(self._context.device, x)
        return x.to(self._dtype) if x.is_floating_point() else x

    def _local_samples(self, microbatch: Any) -> Any:
        if axes := batch_axes(self._context):
            microbatch = shard_of_batch(microbatch, self._context.index(axes), self._context.size(axes))
        return map_batch(self._placed, microbatch)

    def mark_tokens(self, given: Any, microbatch: Any) -> Any:
        """Return what the model is given: what holds a part of the tokens is a `ShardedTensor`."""
        return given if self._sequence is None else self._marked(given, model_input(microbatch), microbatch)

    def for_loss(self, outputs: Any, local: Any, microbatch: Any) -> tuple[Any, int]:
        """Return a rank's part of a microbatch, as a loss function is given it, and how many ranks give the same loss.

        Where outputs have a part of the tokens, so has the microbatch, and what is computed is that of all tokens. Both
        are plain where the model has made its outputs plain (`colossus.layers.local`), and takes care of tokens.
        """
        if self._sequence is None or not any(map(sequence_place, tree_leaves(outputs))):
            return local, 1
        return self._marked(local, microbatch, microbatch), self._sequence.num_shards

    def _marked(self, given: Any, whole: Any, microbatch: Any) -> Any:
        parallel, num_tokens = model_parallel_of(self._context), sequence_length(microbatch)
        places: list[Place | None] = []
        for path, x in leaves(whole):
            if isinstance(x, Tensor):
                dim = self.dims.token_dim(path.rpartition("['")[2][:-2])
                places.append(Place(dim) if _holds_tokens(x, num_tokens) else None)
            elif isinstance(x, WholeEntry):
                places += [None for _ in tensors(x.value)]
        place_of = iter(places)
        return map_batch(lambda x: with_sequence(x, next(place_of), parallel), given)


def batch_axes(context: ParallelContext) -> tuple[str, ...]:
    """The axes beside data over which the samples of a batch are split: tensor axes of 2D, 2.5D and 3D."""
    return tuple(
        axis for axis in model_parallel_of(context).regions.whole.batch if axis not in context.grid.axes("data")
    )


#: of a batch that is a dict: the model's input, and what only the loss looks at
INPUTS, LABELS = "inputs", "labels"


def names_arguments(batch: Any) -> bool:
    """Return whether a batch is a dict of the model's keyword arguments: one without the key "inputs"."""
    return isinstance(batch, Mapping) and INPUTS not in batch


def model_input(batch: Any) -> Any:
    """Return what the model is called with: ``batch["inputs"]``, the first of a tuple, or the batch itself; of a dict
    without "inputs" all but its labels, of which `ForwardCall` leaves those that the model takes.
    """
    if names_arguments(batch):
        return {key: value for key, value in batch.items() if key != LABELS}
    if isinstance(batch, Mapping):
        return batch[INPUTS]
    return batch[0] if isinstance(batch, (tuple, list)) else batch


class ForwardCall:
    """Calls a model's forward, or its first pipeline blocks, with what `model_input` gives.

    A dict without "inputs" is arguments by name. Entries that the forward does not take are the loss function's.
    """

    def __init__(self, model: nn.Module, *, is_partitioned: bool) -> None:
        self._title, self._is_partitioned = type(model).__name__, is_partitioned
        #: blocks of a model that is called as it is take all its arguments
        self._blocks_take_names = getattr(getattr(model, "pipeline_blocks", None), "takes_names", False)
        parameters = inspect.signature(model.forward).parameters.values()
        self._takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
        self._names = [parameter.name for parameter in parameters if parameter.kind not in _NOT_BY_NAME]

    def __call__(self, forward: Callable[..., Any], value: Any, batch: Any) -> Any:
        """Return the output for the input of a batch.

        Raises:
            ValueError: none of a batch's keys is an argument; several are those of blocks that take one input.
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


def sequence_length(batch: Any) -> int:
    """Tokens of each sequence of a batch: dim 1 of what the model is called with.

    Raises:
        ValueError: when no tensor of it has a dim 1.
    """
    for _, x in tensors(model_input(batch)):
        if x.dim() > 1:
            return int(x.shape[1])
    raise ValueError("parallel.sequence splits dim 1 of what the model is called with, but no tensor has two dims")


def _holds_tokens(x: Tensor, num_tokens: int) -> bool:
    return x.dim() > 1 and x.shape[1] == num_tokens


def _local_tokens(batch: Any, sequence: SequenceSplit, pad: bool) -> Any:
    """Of every tensor whose dim 1 is as long as the sequence the tokens of this rank.

    Where sequences are padded: inputs with 0, integers among the rest (labels) with -100, which losses ignore.
    """
    num_tokens = sequence_length(batch)
    missing = sequence.padded_length(num_tokens) - num_tokens if pad else 0
    inputs = {id(x) for _, x in tensors(model_input(batch))}

    def shard(x: Tensor) -> Tensor:
        if not _holds_tokens(x, num_tokens):
            return x
        if missing:
            is_label = id(x) not in inputs and not x.is_floating_point() and x.dtype != torch.bool
            rows = x.new_full((x.shape[0], missing, *x.shape[2:]), IGNORED if is_label else 0)
            x = torch.cat((x, rows), dim=1)
        return sequence.local_shard(x)

    return map_batch(shard, batch)
