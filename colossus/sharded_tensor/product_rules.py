"""Rules of products and attention of split tensors. See `colossus.sharded_tensor.rules`.

Where sequence ranks split tokens, keys and values, and the second of two factors, are gathered. Sums over tokens are
summed over the ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from colossus.layout.operators import Call
from colossus.sharded_tensor.placement import MixesPartsError, Place, avoid
from colossus.sharded_tensor.token_collectives import attend_to_all, require_unpadded, sum_over_ranks
from colossus.sharded_tensor.view_rules import SplitRole, place_of


def matmul(role: SplitRole, call: Call) -> Place | None:
    a, b = _factors(call)
    place_a, place_b = (
        None if p is None else p.at(p.dim - x.dim()) for x, p in ((a, role.place(a)), (b, role.place(b)))
    )
    a_sums = place_a is not None and place_a.dim == -1
    b_sums = place_b is not None and (place_b.dim == -2 or b.dim() == 1)
    if (a_sums or b_sums) and role.is_contiguous:
        raise MixesPartsError("sums over the split dim")
    if a_sums and b_sums and place_a and place_b and place_a[1:] == place_b[1:]:
        role.instead = lambda call: sum_over_ranks(torch.matmul(*_factors(call)), role.parallel)
        return None
    if a_sums:
        role.gather(a)
        place_a = None
    if b_sums:
        role.gather(b)
        place_b = None
    if place_a and place_b:
        if place_a != place_b or place_a.dim > -3:
            if role.is_contiguous:
                raise MixesPartsError("multiplies all of the split dim with all of it")
            role.gather(b)
            place_b = None
        else:
            return place_a
    place = place_a or place_b
    if place is None:
        return None
    if place.dim < -2:
        split, plain = (a, b) if place_a else (b, a)
        role.slice_plain(plain, place.dim, place, role.whole(split))
    if (a.dim() == 1 and place.dim < -1) or b.dim() == 1:  # the vector's dim is gone
        return place.at(place.dim + 1)
    return place


def _factors(call: Call) -> tuple[Tensor, Tensor]:
    return call.get("batch1", "mat1", "self"), call.get("other", "mat2", "vec", "batch2")


def added_product(role: SplitRole, call: Call) -> Place | None:
    """Return the place in the result of baddbmm and addmm: a product and an addend."""
    addend, factors = call.get("self"), _factors(call)
    if all(role.place(x) is None for x in factors):
        raise MixesPartsError("adds a product that is whole to a split tensor")
    place = matmul(role, call)
    if role.instead is not None:
        raise MixesPartsError("sums over the split dim")
    if place is not None:
        role.join(addend, place, role.whole(next(x for x in factors if role.place(x) is not None)))
    elif role.place(addend) is not None:
        role.gather(addend)
    return place


def linear(role: SplitRole, call: Call) -> Place | None:
    x = call.get("self")
    if role.place(call.get("weight")) is not None or role.place(call.get("bias")) is not None:
        raise MixesPartsError("takes a split tensor for a weight")
    if not role.is_contiguous and place_of(role, x).dim == x.dim() - 1:
        role.gather(x)
        return None
    return avoid(place_of(role, x), x.dim(), -1, "sums over")


def attention(role: SplitRole, call: Call) -> Place | None:
    query, key, value, mask = (call.get(name) for name in ("query", "key", "value", "attn_mask"))
    right = {
        name: (p.dim - x.dim() if (p := role.place(x)) else None)
        for name, x in zip("qkv", (query, key, value), strict=True)
    }
    if call.get("dropout_p") and role.is_contiguous:
        raise MixesPartsError(
            "with dropout_p would drop the same of the heads of every rank (put colossus.layers.Dropout behind "
            "merge_heads, or take colossus.layers.Attention(dropout=...))"
        )
    if not role.is_contiguous and right["k"] == right["v"] == -2 and right["q"] in (None, -2):
        return _attention_to_tokens(role, (query, key, value), mask)
    if right["q"] is None or right["q"] == -1 or any(right[name] not in (None, right["q"]) for name in "kv"):
        raise MixesPartsError("looks at a part of the queries, keys or values only")
    place = place_of(role, query).at(right["q"])
    if right["q"] < -2:  # samples, heads
        if None in right.values():
            raise MixesPartsError("needs query, key and value split alike")
        if mask is not None and role.place(mask) is None:
            if mask.dim() > 2 and query.dim() != 4:
                raise MixesPartsError("takes a plain mask with queries [batch, heads, tokens, head_dim] only")
            role.slice_plain(mask, right["q"], place, role.whole(query))
    elif right["k"] is not None or call.get("is_causal"):
        raise MixesPartsError("looks at the tokens of one rank only, as queries, keys or values")
    elif mask is not None and role.place(mask) is None:  # each query attends to all keys
        role.slice_plain(mask, -2, place, role.whole(query))
    return place


def _attention_to_tokens(role: SplitRole, inputs: tuple[Tensor, Tensor, Tensor], mask: Tensor | None) -> Place | None:
    """Return the place of attention to keys and values whose tokens sequence ranks split."""
    query, key, value = inputs
    if role.place(query) is None:
        role.gather(key)
        role.gather(value)
        return None
    places, totals = [place_of(role, x) for x in inputs], (role.whole(query), role.whole(key))
    for place, total in zip(places, totals, strict=False):
        require_unpadded(place, total, role.parallel)
    rows = places[0].at(-2)
    if mask is not None:
        role.join(mask, rows, totals[0])
    role.instead = lambda call: attend_to_all(call, role.parallel, places, totals)
    return rows


def einsum(role: SplitRole, call: Call) -> Place | None:
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
    split = [(term[place.dim], place, x) for term, x in zip(labels, operands, strict=True) if (place := role.place(x))]
    dots = max((sum(isinstance(label, int) for label in term) for term in labels), default=0)
    out = _labels(right, len(right.replace("...", "")) + dots * ("..." in right))
    letter, place, first = next((entry for entry in split if entry[0] in out), split[0])
    if not role.is_contiguous and letter not in out:
        if all(
            role.place(x) == place.at(term.index(letter))
            for term, x in zip(labels, operands, strict=True)
            if letter in term
        ):
            role.instead = lambda call: sum_over_ranks(torch.einsum(*call.get("args")), role.parallel)
        else:
            for _, _, x in split:
                role.gather(x)
        return None
    for other, where, x in split:
        if (other, where[1:]) != (letter, place[1:]):
            if role.is_contiguous:
                raise MixesPartsError("multiplies all of the split dim with all of it")
            role.gather(x)
    for term, x in zip(labels, operands, strict=True):
        if term.count(letter) > 1:
            raise MixesPartsError("takes a diagonal of the split dim")
        if role.place(x) is None and letter in term:
            role.slice_plain(x, term.index(letter) - len(term), place, role.whole(first))
    if letter not in out:
        raise MixesPartsError("sums over the split dim")
    return place.at(out.index(letter))


def _labels(term: str, ndim: int) -> list[str | int]:
    """Return the letters of a term's dims; those of its dots count from the right, from 1 on."""
    before, dots, after = term.partition("...")
    count = ndim - len(before) - len(after) if dots else 0
    return [*before, *range(count, 0, -1), *after]
