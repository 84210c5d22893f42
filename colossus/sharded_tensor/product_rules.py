"""Rules of products and of attention; see `colossus.sharded_tensor.rules`."""

from __future__ import annotations

from colossus.sharded_tensor.operands import At, found, require_one
from colossus.sharded_tensor.operators import Call
from colossus.sharded_tensor.placement import MixesPartsError, Place, avoid


def matmul(at: At, call: Call) -> Place:
    a, b = call.get("self", "batch1", "mat1"), call.get("other", "mat2", "vec", "batch2")
    at_a, at_b = (None if p is None else p.at(p.dim - x.dim()) for x, p in ((a, at(a)), (b, at(b))))
    if (at_a and at_a.dim == -1) or (at_b and (at_b.dim == -2 or b.dim() == 1)):
        raise MixesPartsError("sums over the split dim")
    if at_a and at_b:
        if at_a != at_b or at_a.dim > -3:
            raise MixesPartsError("multiplies all of the split dim with all of it")
        return at_a
    place = at_a or at_b
    assert place is not None
    if place.dim < -2:
        require_one(b if at_a else a, place.dim)
    if (a.dim() == 1 and place.dim < -1) or b.dim() == 1:  # the vector's dim is gone
        return place.at(place.dim + 1)
    return place


def added_product(at: At, call: Call) -> Place:
    x = call.get("self")
    a, b = call.get("mat1", "batch1"), call.get("mat2", "batch2")
    if at(a) is None and at(b) is None:
        raise MixesPartsError("adds a plain product to what is split")
    place = matmul(at, Call("matmul", {"self": a, "other": b}, None))
    if at(x) is None:
        require_one(x, place.dim)
    elif found(at, x).dim - x.dim() != place.dim:
        raise MixesPartsError("adds what is split in different dims")
    return place


def linear(at: At, call: Call) -> Place:
    x = call.get("self")
    if at(call.get("weight")) is not None or at(call.get("bias")) is not None:
        raise MixesPartsError("takes what is split for a weight")
    return avoid(found(at, x), x.dim(), -1, "sums over")


def attention(at: At, call: Call) -> Place:
    query, key, value, mask = (call.get(name) for name in ("query", "key", "value", "attn_mask"))
    right = {
        name: (p.dim - x.dim() if (p := at(x)) else None) for name, x in zip("qkv", (query, key, value), strict=True)
    }
    if call.get("dropout_p") and at.parts:
        raise MixesPartsError(
            "with dropout_p would drop the same of the heads of every rank (put colossus.layers.Dropout behind "
            "merge_heads, or take colossus.layers.Attention(dropout=...))"
        )
    if right["q"] is None or right["q"] == -1 or any(right[name] not in (None, right["q"]) for name in "kv"):
        raise MixesPartsError("looks at a part of the queries, keys or values only")
    if right["q"] < -2:  # samples, heads
        if None in right.values():
            raise MixesPartsError("needs query, key and value split alike")
        if mask is not None and at(mask) is None:
            if not at.parts:
                require_one(mask, right["q"])
            elif right["q"] != (-query.dim() if at.role == "batch" else -3):  # see `local_mask`
                raise MixesPartsError("takes a plain mask with queries [batch, heads, tokens, head_dim] only")
    elif right["k"] is not None or call.get("is_causal"):
        raise MixesPartsError("looks at the tokens of one rank only, as queries, keys or values")
    elif mask is not None and at(mask) is None:  # each query looks at what is whole
        require_one(mask, -2)
    place = found(at, query)
    return place.at(right["q"])


def einsum(at: At, call: Call) -> Place:
    equation, *operands = call.get("args")
    if not isinstance(equation, str):
        raise MixesPartsError("is understood with an equation only: einsum('bth,hk->btk', x, w)")
    given = operands[0] if len(operands) == 1 and isinstance(operands[0], (tuple, list)) else operands
    left, arrow, right = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    if not arrow:
        letters = left.replace(",", "").replace("...", "")
        right = "..." * ("..." in left) + "".join(sorted(each for each in set(letters) if letters.count(each) == 1))
    labels = [_labels(term, x.dim()) for term, x in zip(terms, given, strict=True)]
    split = [(each[place.dim], place) for each, x in zip(labels, given, strict=True) if (place := at(x))]
    letter, place = split[0]
    if any((other, where[1:]) != (letter, place[1:]) for other, where in split):
        raise MixesPartsError("multiplies all of the split dim with all of it")
    for each, x in zip(labels, given, strict=True):
        if each.count(letter) > 1:
            raise MixesPartsError("takes a diagonal of the split dim")
        if at(x) is None and letter in each:
            require_one(x, each.index(letter) - len(each))
    dots = max((sum(isinstance(each, int) for each in term) for term in labels), default=0)
    out = _labels(right, len(right.replace("...", "")) + dots * ("..." in right))
    if letter not in out:
        raise MixesPartsError("sums over the split dim")
    return place.at(out.index(letter))


def _labels(term: str, ndim: int) -> list[str | int]:
    """The letters of a term's dims; those of its dots count from the right, from 1 on."""
    before, dots, after = term.partition("...")
    count = ndim - len(before) - len(after) if dots else 0
    return [*before, *range(count, 0, -1), *after]
