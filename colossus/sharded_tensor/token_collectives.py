"""Collectives over the tokens that sequence ranks split: gathering, selection, reductions and attention.

Each rank computes a share of the loss, so a gradient of a tensor that ranks have whole is a partial sum over them. The
backward of a gather is therefore a reduce-scatter, and that of a sum is a sum. All functions take and return plain
local tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from colossus.comm.conjugate import conjugate
from colossus.layout.operators import Call
from colossus.sequence_parallel.attend import attend
from colossus.sequence_parallel.mask import CAUSAL, FULL
from colossus.sequence_parallel.split import SequenceSplit
from colossus.sharded_tensor.placement import HasRegions, MixesPartsError, Place, Window, as_dims

#: the length in a window of tokens that a mask has selected: any number on each rank, in no common order
CHOSEN = -1


def gather_tokens(x: Tensor, place: Place, parallel: HasRegions) -> Tensor:
    """Return the tokens of all ranks in the order of the sequence: [.., tokens / ranks, ..] -> [.., tokens, ..]."""
    sequence, count = _sequence(parallel), place.count(x.shape)
    start, stop, total = place.window or (0, count * sequence.num_shards, count * sequence.num_shards)
    if total == CHOSEN:
        raise MixesPartsError("gathers tokens that a mask has selected")
    x, dim = x.unflatten(place.dim, (place.before, count, place.after)), place.dim + 1
    if place.window is not None:
        rows = _rows_in(place.window, parallel)
        shape = (*x.shape[:dim], total // sequence.num_shards, *x.shape[dim + 1 :])
        x = x.new_zeros(shape).index_copy(dim, rows.to(x.device), x)
    x = conjugate(x.contiguous(), "gather", "reduce_scatter", parallel.context.group(sequence.axes), dim)
    x = x.index_select(dim, sequence.order(total // sequence.num_shards, x.device)).narrow(dim, start, stop - start)
    return x.flatten(dim - 1, dim + 1)


def select_own_tokens(x: Tensor, dim: int, place: Place, parallel: HasRegions) -> Tensor:
    """Return this rank's tokens of a tensor that has those of all ranks: [.., tokens, ..] -> [.., tokens / ranks, ..].

    Args:
        dim: the dim of the tokens.
        place: the place of the tokens in the split operand.
    """
    count = x.shape[dim] // (place.before * place.after)
    start, _, total = place.window or (0, count, count)
    if total == CHOSEN:
        raise MixesPartsError("combines tokens that a mask has selected with a plain tensor")
    rows = _positions(total, parallel, x.device)
    if place.window is not None:
        rows = rows[_rows_in(place.window, parallel).to(x.device)] - start
    if place.before == place.after == 1:
        return x.index_select(dim, rows)
    return x.unflatten(dim, (place.before, count, place.after)).index_select(dim + 1, rows).flatten(dim, dim + 2)


def select_window(x: Tensor, dim: int, window: Window, parallel: HasRegions) -> Tensor:
    """Return those of this rank's tokens that are in a window: [.., tokens / ranks, ..] -> [.., n, ..]."""
    return x.index_select(dim, _rows_in(window, parallel).to(x.device))


def broadcast_token(x: Tensor, dim: int, number: int, total: int, parallel: HasRegions) -> Tensor:
    """Return one token of the sequence on all ranks: [.., tokens / ranks, ..] -> [.., 1, ..]."""
    mine = select_window(x, dim, (number, number + 1, total), parallel)
    if not mine.shape[dim]:  # zeros in the graph, so that this rank takes part in the sum of the backward
        mine = x.narrow(dim, 0, 1)
        mine = mine.masked_fill(mine.new_ones((), dtype=torch.bool), 0)
    return sum_over_ranks(mine, parallel)


def all_ranks_have_some(window: Window, parallel: HasRegions) -> bool:
    """Return whether each rank has some of the tokens in a window."""
    start, stop, total = window
    sequence = _sequence(parallel)
    count, ranks, cpu = total // sequence.num_shards, sequence.num_shards, torch.device("cpu")
    shards = (sequence.positions(count, index, ranks, cpu) for index in range(ranks))
    return all(bool(((shard >= start) & (shard < stop)).any()) for shard in shards)


def require_unpadded(place: Place, count: int, parallel: HasRegions) -> None:
    """Raise MixesPartsError if the last tokens are padding, since the result would depend on them."""
    num_tokens, total = parallel.batch_info.num_tokens, place.window[2] if place.window else count
    if num_tokens is not None and total not in (num_tokens, CHOSEN):
        raise MixesPartsError(
            f"looks at all tokens, but parallel.sequence.pad has filled up the {num_tokens} of this batch to {total}: "
            f"fill them up in the data, with a mask"
        )


# --- reductions


def reduce_tokens(call: Call, x: Tensor, place: Place, whole: int, parallel: HasRegions) -> Tensor:
    """Return a reduction of the tokens of all ranks, the same on all of them.

    Args:
        whole: the number of elements, on all ranks together, that one element of the result reduces.
    """
    dims = as_dims(call.get("dim"))
    along = tuple(range(x.dim())) if dims is None else tuple(dim % x.dim() for dim in dims)
    keepdim = bool(call.get("keepdim", default=False))
    name = call.name
    if name == "mean":
        dtype = call.get("dtype")
        return sum_over_ranks(x.sum(along, keepdim, dtype=dtype), parallel) / whole
    if name in ("var", "std"):
        correction = call.get("correction", default=1 if call.get("unbiased", default=True) else 0)
        centred = x - sum_over_ranks(x.sum(along, keepdim=True), parallel) / whole
        variance = sum_over_ranks(centred.square().sum(along, keepdim), parallel) / max(whole - correction, 0)
        return variance if name == "var" else variance.sqrt()
    if name in ("norm", "linalg_vector_norm", "linalg_norm"):
        order = call.get("ord", "p")
        order = 2 if order in (None, "fro") else order
        if not isinstance(order, (int, float)) or (name == "linalg_norm" and len(along) > 1):
            raise MixesPartsError("reduces the split dim")
        partial = torch.linalg.vector_norm(x, order, along, keepdim, dtype=call.get("dtype"))
        return _norm_of_parts(partial, order, parallel)
    if name in ("sum", "nansum", "count_nonzero"):
        x = x != 0 if name == "count_nonzero" else x
        total = torch.nansum if name == "nansum" else torch.sum
        return sum_over_ranks(total(x, along, keepdim, dtype=call.get("dtype")), parallel)
    reduce = _REDUCTIONS.get(name)
    if reduce is None or (dims is not None and name in ("max", "min")):
        raise MixesPartsError("reduces the split dim")
    return reduce(_by_rank(reduce(x, along, keepdim), parallel), (0,), False)


def normalize_tokens(call: Call, x: Tensor, place: Place, parallel: HasRegions) -> Tensor:
    """Return a rank's part of the softmax, its logarithm, or the normalized vector along the tokens of all ranks."""
    if call.name == "normalize":
        order, eps = call.get("p", default=2.0), call.get("eps", default=1e-12)
        norm = torch.linalg.vector_norm(x, order, place.dim, keepdim=True)
        return x / _norm_of_parts(norm, order, parallel).clamp_min(eps)
    dtype = call.get("dtype")
    x = x if dtype is None else x.to(dtype)
    total = _by_rank(x.logsumexp(place.dim, keepdim=True), parallel).logsumexp(0)
    return x - total if call.name == "log_softmax" else (x - total).exp()


def _norm_of_parts(norms: Tensor, order: float, parallel: HasRegions) -> Tensor:
    if order == 0:  # the number of elements that are not zero
        return sum_over_ranks(norms, parallel)
    return torch.linalg.vector_norm(_by_rank(norms, parallel), order, 0)


def reduce_loss(call: Call, function: Callable[..., Tensor], parallel: HasRegions, whole: int) -> Tensor:
    """Return one of torch's losses, summed or averaged over the elements of all ranks.

    Args:
        function: calls the loss with the arguments of the call, updated by its own keyword arguments.
        whole: the number of labels, or of elements, on all ranks.
    """
    total = sum_over_ranks(function(reduction="sum"), parallel)
    if call.get("reduction", default="mean") == "sum":
        return total
    if call.name not in ("cross_entropy", "nll_loss"):
        return total / (call.get("self").shape[0] if call.get("reduction") == "batchmean" else whole)
    target, weight = call.get("target"), call.get("weight")
    if target.is_floating_point():
        return total / whole
    valid = target != call.get("ignore_index", default=-100)
    counted = valid if weight is None else weight[target.masked_fill(~valid, 0)] * valid
    return total / sum_over_ranks(counted.sum().to(total.dtype), parallel)


_REDUCTIONS: dict[str, Callable[[Tensor, tuple[int, ...], bool], Tensor]] = {
    "amax": lambda x, dims, keepdim: x.amax(dims, keepdim),
    "amin": lambda x, dims, keepdim: x.amin(dims, keepdim),
    "max": lambda x, dims, keepdim: x.amax(dims, keepdim),
    "min": lambda x, dims, keepdim: x.amin(dims, keepdim),
    "all": lambda x, dims, keepdim: torch.all(x, dims, keepdim),
    "any": lambda x, dims, keepdim: torch.any(x, dims, keepdim),
    "logsumexp": lambda x, dims, keepdim: x.logsumexp(dims, keepdim),
}


# --- attention


def attend_to_all(call: Call, parallel: HasRegions, places: Sequence[Place], totals: Sequence[int]) -> Tensor:
    """Return the attention of this rank's queries to the tokens of all ranks.

    Keys and values go round the ring, or tokens are exchanged for heads. With a mask, with dropout, or for a slice of
    the tokens, keys and values are gathered instead; the mask has the rows of this rank's queries.

    Args:
        places: the places of the tokens in query, key and value.
        totals: the number of queries, and of keys, of all ranks.
    """
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale")
    query, key, value, mask, dropout, causal, scale = (call.get(name) for name in names)
    sequence = _sequence(parallel)
    ulysses = sequence.ulysses.size
    if (
        mask is None
        and not dropout
        and query.dim() == 4
        and query.shape[-1] == key.shape[-1] == value.shape[-1]
        and not (query.shape[1] % ulysses or key.shape[1] % ulysses)
        and all(place == Place(2) for place in places)
    ):
        mask, groups = CAUSAL if causal else FULL, (sequence.ring, sequence.ulysses)
        return attend(query, key, value, *groups, mask=mask, scale=scale, chunks=sequence.chunks)
    key, value = (gather_tokens(x, place, parallel) for x, place in zip((key, value), places[1:], strict=True))
    if causal:
        queries, keys = (torch.arange(total, device=query.device) for total in totals)
        mask = select_own_tokens(queries, 0, places[0].at(0), parallel)[:, None] >= keys
    grouped = bool(call.get("enable_gqa", default=False))
    return F.scaled_dot_product_attention(query, key, value, mask, dropout or 0.0, scale=scale, enable_gqa=grouped)


# --- helpers


def _sequence(parallel: HasRegions) -> SequenceSplit:
    assert parallel.sequence is not None, "tokens are split"
    return parallel.sequence


def sum_over_ranks(x: Tensor, parallel: HasRegions) -> Tensor:
    """Return the sum of a tensor over the sequence ranks; the gradient is summed, too."""
    return conjugate(x, "sum", "sum", parallel.context.group(_sequence(parallel).axes))


def _by_rank(x: Tensor, parallel: HasRegions) -> Tensor:
    """Gather a tensor from the sequence ranks: [..] -> [ranks, ..]."""
    group = parallel.context.group(_sequence(parallel).axes)
    return conjugate(x.unsqueeze(0).contiguous(), "gather", "reduce_scatter", group, 0)


def _positions(total: int, parallel: HasRegions, device: Any) -> Tensor:
    sequence = _sequence(parallel)
    index = parallel.context.index(sequence.axes)
    return sequence.positions(total // sequence.num_shards, index, sequence.num_shards, torch.device(device))


def _rows_in(window: Window, parallel: HasRegions) -> Tensor:
    """Return the indices of this rank's tokens that are in a window, on the CPU."""
    start, stop, total = window
    positions = _positions(total, parallel, "cpu")
    return ((positions >= start) & (positions < stop)).nonzero().squeeze(1)
