"""Products and attention of what is split: where the split dim is in what comes out.

Of tokens that sequence ranks split, keys and values, and the second of two factors, are gathered; what is summed over
tokens is summed over ranks. See `colossus.sharded_tensor.rules`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from colossus.layout.operators import Call
from colossus.sharded_tensor.placement import MixesPartsError, Place, avoid
from colossus.sharded_tensor.token_collectives import attend_to_all, require_unpadded, sum_over_ranks
from colossus.sharded_tensor.view_rules import At, place_of


def matmul(at: At, call: Call) -> Place | None:
    a, b = _factors(call)
    at_a, at_b = (None if p is None else p.at(p.dim - x.dim()) for x, p in ((a, at(a)), (b, at(b))))
    a_sums = at_a is not None and at_a.dim == -1
    b_sums = at_b is not None and (at_b.dim == -2 or b.dim() == 1)
    if (a_sums or b_sums) and at.parts:
        raise MixesPartsError("sums over the split dim")
    if a_sums and b_sums and at_a and at_b and at_a[1:] == at_b[1:]:
        at.instead = lambda call: sum_over_ranks(torch.matmul(*_factors(call)), at.parallel)
        return None
    if a_sums:
        at.gather(a)
        at_a = None
    if b_sums:
        at.gather(b)
        at_b = None
    if at_a and at_b:
        if at_a != at_b or at_a.dim > -3:
            if at.parts:
                raise MixesPartsError("multiplies all of the split dim with all of it")
            at.gather(b)
            at_b = None
        else:
            return at_a
    place = at_a or at_b
    if place is None:
        return None
    if place.dim < -2:
        split, plain = (a, b) if at_a else (b, a)
        at.slice_plain(plain, place.dim, place, at.whole(split))
    if (a.dim() == 1 and place.dim < -1) or b.dim() == 1:  # the vector's dim is gone
        return place.at(place.dim + 1)
    return place


def _factors(call: Call) -> tuple[Tensor, Tensor]:
    return call.get("batch1", "mat1", "self"), call.get("other", "mat2", "vec", "batch2")


def added_product(at: At, call: Call) -> Place | None:
    """Return the place in baddbmm, addmm: a product, and what is added to it."""
    addend, factors = call.get("self"), _factors(call)
    if all(at(x) is None for x in factors):
        raise MixesPartsError("adds to what is split a product that is whole")
    place = matmul(at, call)
    if at.instead is not None:
        raise MixesPartsError("sums over the split dim")
    if place is not None:
        at.join(addend, place, at.whole(next(x for x in factors if at(x) is not None)))
    elif at(addend) is not None:
        at.gather(addend)
    return place


def linear(at: At, call: Call) -> Place | None:
    x = call.get("self")
    if at(call.get("weight")) is not None or at(call.get("bias")) is not None:
        raise MixesPartsError("takes what is split for a weight")
    if not at.parts and place_of(at, x).dim == x.dim() - 1:
        at.gather(x)
        return None
    return avoid(place_of(at, x), x.dim(), -1, "sums over")


def attention(at: At, call: Call) -> Place | None:
    query, key, value, mask = (call.get(name) for name in ("query", "key", "value", "attn_mask"))
    right = {
        name: (p.dim - x.dim() if (p := at(x)) else None) for name, x in zip("qkv", (query, key, value), strict=True)
    }
    if call.get("dropout_p") and at.parts:
        raise MixesPartsError(
            "with dropout_p would drop the same of the heads of every rank (put colossus.layers.Dropout behind "
            "merge_heads, or take colossus.layers.Attention(dropout=...))"
        )
    if not at.parts and right["k"] == right["v"] == -2 and right["q"] in (None, -2):
        return _attention_to_tokens(at, (query, key, value), mask)
    if right["q"] is None or right["q"] == -1 or any(right[name] not in (None, right["q"]) for name in "kv"):
        raise MixesPartsError("looks at a part of the queries, keys or values only")
    place = place_of(at, query).at(right["q"])
    if right["q"] < -2:  # samples, heads
        if None in right.values():
            raise MixesPartsError("needs query, key and value split alike")
        if mask is not None and at(mask) is None:
            if mask.dim() > 2 and query.dim() != 4:
                raise MixesPartsError("takes a plain mask with queries [batch, heads, tokens, head_dim] only")
            at.slice_plain(mask, right["q"], place, at.whole(query))
    elif right["k"] is not None or call.get("is_causal"):
        raise MixesPartsError("looks at the tokens of one rank only, as queries, keys or values")
    elif mask is not None and at(mask) is None:  # each query looks at what is whole
        at.slice_plain(mask, -2, place, at.whole(query))
    return place


def _attention_to_tokens(at: At, inputs: tuple[Tensor, Tensor, Tensor], mask: Tensor | None) -> Place | None:
    """Return the place of attention to keys and values whose tokens sequence ranks split."""
    query, key, value = inputs
    if at(query) is None:
        at.gather(key)
        at.gather(value)
        return None
    places, totals = [place_of(at, x) for x in inputs], (at.whole(query), at.whole(key))
    for place, total in zip(places, totals, strict=False):
        require_unpadded(place, total, at.parallel)
    rows = places[0].at(-2)
    if mask is not None:
        at.join(mask, rows, totals[0])
    at.instead = lambda call: attend_to_all(call, at.parallel, places, totals)
    return rows


def einsum(at: At, call: Call) -> Place | None:
    equation, *operands = call.get("args")
    if not isinstance(equation, str):
        raise MixesPartsError("is understood with an equation only: einsum('bth,hk->btk', x, w)")
    operands = list(operands[0]) if len(operands) == 1 and isinstance(operands[0], (tuple, list)) else operands
    inputs, arrow, right = equation.replace(" ", "").partition("->")
    terms = inputs.split(",")
    if not arrow:
        letters = inputs.replace(",", "").replace("...", "")
        right = "..." * ("..." in inputs) + "".join(
            sorted(letter for letter in set(letters) if letters.count(letter) == 1)
        )
    labels = [_labels(term, x.dim()) for term, x in zip(terms, operands, strict=True)]
    split = [(term[place.dim], place, x) for term, x in zip(labels, operands, strict=True) if (place := at(x))]
    dots = max((sum(isinstance(label, int) for label in term) for term in labels), default=0)
    out = _labels(right, len(right.replace("...", "")) + dots * ("..." in right))
    letter, place, first = next((entry for entry in split if entry[0] in out), split[0])
    if not at.parts and letter not in out:
        if all(
            at(x) == place.at(term.index(letter)) for term, x in zip(labels, operands, strict=True) if letter in term
        ):
            at.instead = lambda call: sum_over_ranks(torch.einsum(*call.get("args")), at.parallel)
        else:
            for _, _, x in split:
                at.gather(x)
        return None
    for other, where, x in split:
        if (other, where[1:]) != (letter, place[1:]):
            if at.parts:
                raise MixesPartsError("multiplies all of the split dim with all of it")
            at.gather(x)
    for term, x in zip(labels, operands, strict=True):
        if term.count(letter) > 1:
            raise MixesPartsError("takes a diagonal of the split dim")
        if at(x) is None and letter in term:
            at.slice_plain(x, term.index(letter) - len(term), place, at.whole(first))
    if letter not in out:
        raise MixesPartsError("sums over the split dim")
    return place.at(out.index(letter))


def _labels(term: str, ndim: int) -> list[str | int]:
    """Return the letters of a term's dims; those of its dots count from the right, from 1 on."""
    before, dots, after = term.partition("...")
    count = ndim - len(before) - len(after) if dots else 0
    return [*before, *range(count, 0, -1), *after]
