"""Functions over the samples of all ranks, for losses and layers that combine several samples.

A rank has a part of the samples of a microbatch: data ranks split them, and so do the tensor ranks of 2D, 2.5D and 3D.
After these functions a value of several samples (the logits of a contrastive loss, a mean or a covariance over the
batch) is computed from all of them, and is the same under every plan.

A rank returns the loss of the gathered samples, times the number of its own samples, and that number. The engine sums
both over ranks, and the gradients: each rank's part of the gradient of every sample goes back to the rank that has it.
"""

from __future__ import annotations

from torch import Tensor

from colossus.comm.conjugate import conjugate
from colossus.context.groups import AxisGroup
from colossus.context.parallel_context import current_context
from colossus.error_place import located_error
from colossus.layers.model_parallel import ModelParallel, model_parallel_of
from colossus.sharded_tensor.placement import Place, placement_of
from colossus.sharded_tensor.regions import sequence_place, to_whole
from colossus.sharded_tensor.tensor import plain, wrap
from colossus.sharded_tensor.token_collectives import gather_tokens


def gather_samples(x: Tensor) -> Tensor:
    """Return the samples of all ranks, in the order of the batch of one process.

    They are those of the microbatch: with ``schedule.microbatches`` of M, every M-th sample of the global batch. Split
    features are gathered first, and so are the tokens of a sequence that ranks split, without padding. In one process x
    is returned unchanged. Replicas with parameters of their own (gossip, local SGD) gather no samples of each other.

    Each of n ranks sends n - 1 times x in forward, and as much in backward, where the gradients of all ranks are
    summed.

    Shape:
        [samples of this rank, ..] -> [samples of the microbatch, ..], a plain tensor, the same on all ranks.

    Raises:
        ValueError: inside an engine whose config does not set ``train.samples_interact``.
    """
    x = to_whole(x)
    parallel, group = _sample_ranks(x, "gather_samples")
    place = sequence_place(x)
    x = plain(x) if place is None else _with_all_tokens(x, place, parallel)
    return conjugate(x, "gather", "reduce_scatter", group, 0)


def mean_over_samples(x: Tensor) -> Tensor:
    """Return the mean over the samples that `gather_samples` would gather, without gathering them.

    The variance is ``mean_over_samples((x - mean_over_samples(x)) ** 2)``.

    Each of n ranks sends 2 (n - 1) / n times the mean in forward, and as much in backward.

    Shape:
        [samples of this rank, ..] -> [..], the same on all ranks; the tokens of a sequence stay split.

    Raises:
        ValueError: inside an engine whose config does not set ``train.samples_interact``.
    """
    x = to_whole(x)
    _, group = _sample_ranks(x, "mean_over_samples")
    mean = x.mean(0)
    if group.size == 1:
        return mean
    return wrap(conjugate(plain(mean), "sum", "sum", group) / group.size, placement_of(mean))


def _sample_ranks(x: Tensor, name: str) -> tuple[ModelParallel, AxisGroup]:
    """Return the ranks that have the samples of a microbatch, and how they split the model."""
    placement = placement_of(x)
    parallel = placement.parallel if placement is not None else model_parallel_of(current_context())
    assert isinstance(parallel, ModelParallel)
    if parallel.batch_info.microbatch_size and not parallel.samples_interact:
        raise located_error(
            f"{name} combines samples, but the samples of a microbatch, or of a batch of an evaluation, depend on the "
            f"plan: set train.samples_interact=True, and they are the same under every plan"
        )
    return parallel, parallel.context.group(parallel.sample_axes)


def _with_all_tokens(x: Tensor, place: Place, parallel: ModelParallel) -> Tensor:
    """Return a plain tensor with the tokens of all sequence ranks in place of this rank's."""
    if place != Place(place.dim) or place.dim == 0:
        raise located_error(f"gather_samples takes samples in dim 0 and tokens in a dim of their own, but got {x!r}")
    whole = gather_tokens(plain(x), place, parallel)
    num_tokens = parallel.batch_info.num_tokens
    return whole if num_tokens is None else whole.narrow(place.dim, 0, num_tokens)
