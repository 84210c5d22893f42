"""Tokens that sequence ranks split: put together, taken, chosen, and reduced over, each by one collective.

Gradients of plain tensors are addends over these ranks, and so is the loss, of which a rank computes its share. So what
is gathered is summed in backward, and what is summed, too. All take and give plain local tensors.
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
from colossus.sequence_parallel.split import SequenceSplit
from colossus.sharded_tensor.placement import HasRegions, MixesPartsError, Place, Window, as_dims

#: in the place of a sequence's length in a window: some tokens of each rank, which nothing but ranks puts in order
CHOSEN = -1


def whole_tokens(x: Tensor, place: Place, parallel: HasRegions) -> Tensor:
    """Return the tokens of all ranks in the order of the sequence: [.., tokens / ranks, ..] -> [.., tokens, ..]."""
    sequence, count = _sequence(parallel), place.count(x.shape)
    start, stop, total = place.window or (0, count * sequence.num_shards, count * sequence.num_shards)
    if total == CHOSEN:
        raise MixesPartsError("brings tokens together that a mask has chosen")
    x, dim = x.unflatten(place.dim, (place.before, count, place.after)), place.dim + 1
    if place.window is not None:
        rows = _rows_in(place.window, parallel)
        shape = (*x.shape[:dim], total // sequence.num_shards, *x.shape[dim + 1 :])
        x = x.new_zeros(shape).index_copy(dim, rows.to(x.device), x)
    x = conjugate(x.contiguous(), "gather", "reduce_scatter", parallel.context.group(sequence.axes), dim)
    x = x.index_select(dim, sequence.order(total // sequence.num_shards, x.device)).narrow(dim, start, stop - start)
    return x.flatten(dim - 1, dim + 1)


def own_tokens(x: Tensor, dim: int, place: Place, parallel: HasRegions) -> Tensor:
    """Return this rank's tokens of a tensor that has those of all ranks: [.., tokens, ..] -> [.., tokens / ranks, ..].

    Args:
        dim: of the tokens.
        place: how the tensor that they meet is split.
    """
    count = x.shape[dim] // (place.before * place.after)
    start, _, total = place.window or (0, count, count)
    if total == CHOSEN:
        raise MixesPartsError("lets tokens that a mask has chosen meet a plain tensor")
    rows = _positions(total, parallel, x.device)
    if place.window is not None:
        rows = rows[_rows_in(place.window, parallel).to(x.device)] - start
    if place.before == place.after == 1:
        return x.index_select(dim, rows)
    return x.unflatten(dim, (place.before, count, place.after)).index_select(dim + 1, rows).flatten(dim, dim + 2)


def sliced(x: Tensor, dim: int, window: Window, parallel: HasRegions) -> Tensor:
    """Return this rank's tokens among those of a window; ``x`` has a rank's part of all."""
    return x.index_select(dim, _rows_in(window, parallel).to(x.device))


def one_token(x: Tensor, dim: int, number: int, total: int, parallel: HasRegions) -> Tensor:
    """Return one token of all, with its dim of one: [.., tokens / ranks, ..] -> [.., 1, ..]."""
    mine = sliced(x, dim, (number, number + 1, total), parallel)
    if not mine.shape[dim]:  # zero, but a node of the graph, whose backward sums over ranks as theirs
        mine = x.narrow(dim, 0, 1)
        mine = mine.masked_fill(mine.new_ones((), dtype=torch.bool), 0)
    return over_ranks(mine, parallel)


def leaves_all_some(window: Window, parallel: HasRegions) -> bool:
    """Return whether each rank has some of the tokens in a window."""
    start, stop, total = window
    sequence = _sequence(parallel)
    count, ranks, cpu = total // sequence.num_shards, sequence.num_shards, torch.device("cpu")
    shards = (sequence.positions(count, index, ranks, cpu) for index in range(ranks))
    return all(bool(((shard >= start) & (shard < stop)).any()) for shard in shards)


def require_unpadded(place: Place, count: int, parallel: HasRegions) -> None:
    """Raise MixesPartsError where the last of the tokens are padding, which would count."""
    num_tokens, total = parallel.batch_info.num_tokens, place.window[2] if place.window else count
    if num_tokens is not None and total not in (num_tokens, CHOSEN):
        raise MixesPartsError(
            f"looks at all tokens, but parallel.sequence.pad has filled up the {num_tokens} of this batch to {total}: "
            f"fill them up in the data, with a mask"
        )


# --- reductions


def reduced(call: Call, x: Tensor, place: Place, whole: int, parallel: HasRegions) -> Tensor:
    """Return a reduction of the tokens of all ranks, the same on all of them.

    Args:
        whole: the elements that all ranks have together for one that this rank has in the result.
    """
    dims = as_dims(call.get("dim"))
    along = tuple(range(x.dim())) if dims is None else tuple(dim % x.dim() for dim in dims)
    keepdim = bool(call.get("keepdim", default=False))
    name = call.name
    if name == "mean":
        dtype = call.get("dtype")
        return over_ranks(x.sum(along, keepdim, dtype=dtype), parallel) / whole
    if name in ("var", "std"):
        correction = call.get("correction", default=1 if call.get("unbiased", default=True) else 0)
        centred = x - over_ranks(x.sum(along, keepdim=True), parallel) / whole
        variance = over_ranks(centred.square().sum(along, keepdim), parallel) / max(whole - correction, 0)
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
        return over_ranks(total(x, along, keepdim, dtype=call.get("dtype")), parallel)
    reduce = _REDUCTIONS.get(name)
    if reduce is None or (dims is not None and name in ("max", "min")):
        raise MixesPartsError("reduces the split dim")
    return reduce(_by_rank(reduce(x, along, keepdim), parallel), (0,), False)


def rescaled(call: Call, x: Tensor, place: Place, parallel: HasRegions) -> Tensor:
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
        return over_ranks(norms, parallel)
    return torch.linalg.vector_norm(_by_rank(norms, parallel), order, 0)


def reduced_loss(call: Call, function: Callable[..., Tensor], parallel: HasRegions, whole: int) -> Tensor:
    """Return one of torch's losses, summed or averaged over the elements of all ranks.

    Args:
        function: calls it with the keyword arguments that it is given beside those of the call.
        whole: labels, or elements, of all ranks.
    """
    total = over_ranks(function(reduction="sum"), parallel)
    if call.get("reduction", default="mean") == "sum":
        return total
    if call.name not in ("cross_entropy", "nll_loss"):
        return total / (call.get("self").shape[0] if call.get("reduction") == "batchmean" else whole)
    target, weight = call.get("target"), call.get("weight")
    if target.is_floating_point():
        return total / whole
    valid = target != call.get("ignore_index", default=-100)
    counted = valid if weight is None else weight[target.masked_fill(~valid, 0)] * valid
    return total / over_ranks(counted.sum().to(total.dtype), parallel)


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


def attended(call: Call, parallel: HasRegions, places: Sequence[Place], totals: Sequence[int]) -> Tensor:
    """Return the attention of this rank's queries to the tokens of all ranks.

    Without a mask tokens go round the ring, or are exchanged for heads. With one, with dropout, and of a slice of the
    tokens, keys and values are gathered, and the mask has the rows of this rank's queries.

    Args:
        places: how queries, keys and values are split.
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
        return attend(query, key, value, sequence.ring, sequence.ulysses, causal=bool(causal), scale=scale)
    key, value = (whole_tokens(x, place, parallel) for x, place in zip((key, value), places[1:], strict=True))
    if causal:
        queries, keys = (torch.arange(total, device=query.device) for total in totals)
        mask = own_tokens(queries, 0, places[0].at(0), parallel)[:, None] >= keys
    grouped = bool(call.get("enable_gqa", default=False))
    return F.scaled_dot_product_attention(query, key, value, mask, dropout or 0.0, scale=scale, enable_gqa=grouped)


# --- what they are made of


def _sequence(parallel: HasRegions) -> SequenceSplit:
    assert parallel.sequence is not None, "tokens are split"
    return parallel.sequence


def over_ranks(x: Tensor, parallel: HasRegions) -> Tensor:
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
    """Return which of this rank's tokens are in a window, on the CPU."""
    start, stop, total = window
    positions = _positions(total, parallel, "cpu")
    return ((positions >= start) & (positions < stop)).nonzero().squeeze(1)
