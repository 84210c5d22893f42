"""Guesses of the cause of a difference, from the numbers: each looks for one kind of mistake and says what it saw.

A guess is made only where it explains the whole difference up to rounding, so that a wrong hint is rare.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from colossus.arithmetic import named_ranks
from colossus.verify.record_folder import Whole


@dataclass(frozen=True)
class Scene:
    """The numbers of a run that factors are compared with.

    Attributes:
        ranks: ranks of the run.
        batches: groups of ranks with samples of their own.
        forwards: forwards of a rank in a step (microbatches).
        bound: relative difference that rounding explains.
    """

    ranks: int
    batches: int
    forwards: int
    bound: float


def distance(value: Tensor, reference: Tensor, floor: float = 0.0) -> float:
    """Return the norm of the difference over the larger of the reference's norm and ``floor``; inf where not finite."""
    scale = max(torch.linalg.vector_norm(reference).item(), floor)
    apart = torch.linalg.vector_norm(value - reference).item()
    if not math.isfinite(apart):
        return math.inf
    return apart / scale if scale else (math.inf if apart else 0.0)


def explains(explained: Tensor, reference: Tensor, apart: float, bound: float) -> bool:
    """Return whether a changed value is the reference up to rounding, and a tenth of the difference that it had."""
    return distance(explained, reference) <= min(4 * bound, apart / 10)


def factor_of(value: Tensor, reference: Tensor) -> float:
    """Return the factor by which the reference is nearest to the value."""
    square = reference.square().sum().item()
    return (value * reference).sum().item() / square if square else math.nan


def causes_of_start(whole: Whole, reference: Tensor) -> Iterator[str]:
    """Yield what explains the difference of an initial value."""
    boxes = list(whole.copies.values())
    if len(boxes) > 1 and any(
        copies[0][1].shape == boxes[0][0][1].shape and torch.equal(copies[0][1], boxes[0][0][1]) for copies in boxes[1:]
    ):
        yield "parts of different ranks are equal: each draws its part by the same seed"
    if line := words_of_order(whole.value, reference, 1e-6):
        yield line
    factor = factor_of(whole.value, reference)
    if math.isfinite(factor) and abs(factor - 1) > 0.01 and distance(whole.value, factor * reference) < 1e-2:
        yield f"it is {factor:.4g} times the reference: the fan of a part in place of the whole's"


def causes_of_gradient(gradient: Whole, reference: Tensor, scene: Scene) -> Iterator[str]:
    """Yield what explains the difference of a gradient."""
    value, apart = gradient.value, distance(gradient.value, reference)
    if not value.isfinite().all():
        yield f"{int((~value.isfinite()).sum()):,} of its elements are not finite"
        return
    if not value.any() and reference.any():
        yield "it is zero: no loss depends on this parameter here, or its gradient was cleared or never summed"
        return
    if line := _sum_of_copies(gradient, reference, scene):
        yield line
        return
    factor = factor_of(value, reference)
    if is_factor(factor) and explains(value / factor, reference, apart, scene.bound):
        yield f"it is {words_of_factor(factor, scene)}"
        return
    if gradient.dtype in (torch.float32, torch.float64) and torch.equal(value.bfloat16().double(), value):
        yield f"all its elements are numbers of bfloat16, though its dtype is {str(gradient.dtype)[6:]}: it was rounded"
        return
    yield (
        _parts_by_factor(gradient, reference, scene)
        or words_of_order(value, reference, scene.bound)
        or _where(gradient, reference, scene.bound)
    )


def is_factor(factor: float) -> bool:
    """Return whether a factor is finite and not zero."""
    return math.isfinite(factor) and abs(factor) > 1e-6


def words_of_factor(factor: float, scene: Scene, *, of_sum: bool = True) -> str:
    """Return a factor with what it is a number of.

    Args:
        of_sum: whether the value is a sum over ranks and forwards.
    """
    near = [("ranks", scene.ranks), ("groups of ranks with samples of their own", scene.batches)]
    near += [("forwards of a step", scene.forwards), ("forwards of all ranks", scene.batches * scene.forwards)]
    near_to = min(4 * scene.bound, 0.05)
    if abs(factor + 1) <= near_to:
        return "the reference with the other sign"
    for inverse in (False, True):
        number = 1 / factor if inverse and factor else factor
        names = dict.fromkeys(name for name, size in near if size > 1 and abs(number / size - 1) <= near_to)
        if names:
            times = f"1/{round(number)} of" if inverse else f"{round(number)} times"
            what = "divided by them once too often" if inverse else "summed over them where a mean is due"
            return f"{times} the reference: the number of {' or '.join(names)}" + (f", so {what}" if of_sum else "")
    return f"{factor:.6g} times the reference"


def _sum_of_copies(gradient: Whole, reference: Tensor, scene: Scene) -> str:
    """Look at copies of one box on several ranks: are they different, and is their sum or mean the reference?"""
    ranks: set[int] = set()
    total, mean = gradient.value.clone(), gradient.value.clone()
    for box, copies in gradient.copies.items():
        where = tuple(slice(*span) for span in box)
        values = [copy.double() for _, copy in copies]
        different = any(distance(other, values[0]) > 4 * scene.bound for other in values[1:])
        ranks |= {rank for rank, _ in copies} if different else set()
        unlike = [x for index, x in enumerate(values) if all(distance(x, y) > 4 * scene.bound for y in values[:index])]
        total[where], mean[where] = sum(unlike), sum(values) / len(values)
    if not ranks:
        return ""
    who = f"{named_ranks(sorted(ranks))} have different gradients of it"
    apart = distance(gradient.value, reference)
    name, value = min({"sum": total, "mean": mean}.items(), key=lambda item: distance(item[1], reference))
    if explains(value, reference, apart, scene.bound):
        return f"{who}, and their {name} is the reference's: the {name} over these ranks is missing"
    factor = factor_of(total, reference)
    if is_factor(factor) and explains(total / factor, reference, apart, scene.bound):
        return f"{who}, and their sum is {words_of_factor(factor, scene)}: a sum over these ranks is missing"
    return f"{who}: copies of one parameter drift apart"


def _parts_by_factor(gradient: Whole, reference: Tensor, scene: Scene) -> str:
    """Look for parts that are right beside parts that have a factor."""
    lines = []
    for box, copies in gradient.copies.items():
        part, other = copies[0][1].double(), reference[tuple(slice(*span) for span in box)]
        if distance(part, other) <= 4 * scene.bound:
            continue
        factor, apart = factor_of(part, other), distance(part, other)
        is_zero = not part.any()
        if len(gradient.copies) == 1 or not (
            is_zero or (is_factor(factor) and explains(part / factor, other, apart, scene.bound))
        ):
            return ""
        ranks = named_ranks([rank for rank, _ in copies])
        what = "zero" if is_zero else words_of_factor(factor, scene)
        lines.append(f"the part of {ranks} is {what}")
    return "; ".join(lines)


def words_of_order(value: Tensor, reference: Tensor, bound: float) -> str:
    """Return words if the value has the reference's rows or columns in another order; empty if it has not."""
    apart = distance(value, reference)
    for dim in range(2 if value.dim() > 1 else 0):
        mine, theirs = (x.movedim(dim, 0).flatten(1) for x in (value, reference))
        weights = torch.cos(1.7 * torch.arange(1, mine.shape[1] + 1, dtype=torch.float64))
        mine_order, their_order = (mine @ weights).argsort(), (theirs @ weights).argsort()
        if explains(mine[mine_order], theirs[their_order], apart, bound):
            moved = int((mine_order != their_order).sum())
            name = ("rows", "columns")[dim]
            return f"it has the reference's {name} in another order ({moved} of {len(mine)} are elsewhere)"
    return ""


def _where(gradient: Whole, reference: Tensor, bound: float) -> str:
    """Return where the difference is, if it is the part of some ranks, or a few rows; empty if it is all over."""
    apart = distance(gradient.value, reference)
    wrong = [
        copies[0][0]
        for box, copies in gradient.copies.items()
        if not explains(copies[0][1].double(), reference[tuple(slice(*span) for span in box)], apart, bound)
    ]
    if len(wrong) < len(gradient.copies):
        return f"only the part of {named_ranks(wrong)} is wrong"
    rows = (gradient.value - reference).abs()
    rows = rows.flatten(1).amax(1) if rows.dim() > 1 else rows
    wrong = (rows > bound * reference.square().mean().sqrt()).nonzero().flatten().tolist()
    if not wrong or len(wrong) > len(rows) // 2:
        return ""
    span = str(wrong[0]) if len(wrong) == 1 else f"{wrong[0]} to {wrong[-1]}"
    return f"{len(wrong)} of {len(rows)} rows are wrong ({span}), the others right"


def cause_of_all(gradients: Mapping[str, Whole], references: Mapping[str, Whole], scene: Scene) -> str:
    """Return what all gradients together say: one factor for every one of them."""
    names = [name for name in references if name in gradients and references[name].value.any()]
    factors = [factor_of(gradients[name].value, references[name].value) for name in names]
    if len(names) < 2 or not all(map(math.isfinite, factors)):
        return ""
    middle = sorted(factors)[len(factors) // 2]
    if not is_factor(middle):
        return ""
    for name in names:
        value, reference = gradients[name].value, references[name].value
        if not explains(value / middle, reference, distance(value, reference), scene.bound):
            return ""
    return f"all {len(names)} gradients are {words_of_factor(middle, scene)}"


def cause_of_norm(claimed: float, gradients: Mapping[str, Whole], norm: float, scene: Scene) -> str:
    """Return what explains a norm that is not that of the gradients.

    Args:
        claimed: the norm by which the loop clips.
        norm: the norm of the recorded gradients.
    """
    near = min(4 * scene.bound, 0.02)
    if scene.ranks > 1:
        of_rank: dict[int, float] = {}
        total = 0.0
        for whole in gradients.values():
            for copies in whole.copies.values():
                for rank, value in copies:
                    square = value.double().square().sum().item()
                    of_rank[rank] = of_rank.get(rank, 0.0) + square
                    total += square
        if total and abs(claimed / math.sqrt(total) - 1) <= near:
            return "it counts every rank's parts: parameters that several ranks have are counted several times"
        for rank, square in sorted(of_rank.items()):
            if square and abs(claimed / math.sqrt(square) - 1) <= near:
                return f"it is that of rank {rank}'s own parts: the sum of squares over ranks is missing"
    return f"it is {words_of_factor(claimed / norm, scene)}" if norm else ""


def causes_of_update(update: Tensor, reference: Tensor, weight: Tensor, scene: Scene) -> Iterator[str]:
    """Yield what explains the difference of an update (the weight after the step less the weight before).

    Args:
        weight: the weight before.
    """
    if not update.any() and reference.any():
        yield "it did not change: no optimizer has it"
        return
    factor = factor_of(update, reference)
    apart = distance(update, reference)
    if is_factor(factor) and explains(update / factor, reference, apart, 2 * scene.bound):
        yield f"its update is {words_of_factor(factor, scene, of_sum=False)}; look at the learning rate"
        return
    difference = update - reference
    decay = factor_of(difference, weight)
    if is_factor(decay) and distance(difference, decay * weight) <= 0.01:
        yield f"its update differs by {decay:.3g} times the weight: weight decay"
