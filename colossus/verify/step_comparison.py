"""A step of two records: what differs, by how much against rounding, and what the numbers say of the cause."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from colossus.arithmetic import named_ranks
from colossus.verify.causes import (
    Scene,
    cause_of_all,
    cause_of_norm,
    causes_of_gradient,
    causes_of_start,
    causes_of_update,
    distance,
    factor_of,
    is_factor,
    words_of_factor,
)
from colossus.verify.compared_outputs import Outputs
from colossus.verify.record_folder import Forward, StepRecord, Whole, put_together
from colossus.verify.rounding import FLOOR, norm_of, rounding_bound

#: gradients below this many times the rounding of their parameter's root mean square may consist of it
NOISE = 16.0

_RANKS_DIFFER = "ranks that have the same part of it have different values"


@dataclass
class Difference:
    """A value that differs.

    Attributes:
        kind: ``start``, ``data``, ``loss``, ``gradient``, ``norm`` or ``weight``.
        relative: norm of the difference over the scale; inf where the two cannot be compared.
        bound: the relative difference that rounding explains.
        lines: what was seen, and the cause that explains it.
    """

    kind: str
    step: int
    name: str = ""
    relative: float = math.inf
    bound: float = 0.0
    lines: list[str] = field(default_factory=list)


class StepComparison:
    """A step of both records."""

    def __init__(
        self,
        step: int,
        mine: list[StepRecord],
        theirs: list[StepRecord],
        tolerance: float | None,
        before: StepComparison | None,
    ) -> None:
        self.step, self.mine, self.theirs, self.before = step, mine, theirs, before
        self.weights = put_together(mine, "weight"), put_together(theirs, "weight")
        self.gradients = put_together(mine, "gradient"), put_together(theirs, "gradient")
        names = {name for rank in [*mine, *theirs] for name in rank.dtypes}
        names |= {str(whole.dtype).removeprefix("torch.") for side in self.weights for whole in side.values()}
        self.dtype_name = max(names, key=lambda name: torch.finfo(getattr(torch, name)).eps, default="float64")
        depth = max((len(forward.outputs) for rank in theirs for forward in rank.forwards), default=0)
        terms = max((size for whole in self.weights[1].values() for size in whole.shape), default=1)
        rounding = rounding_bound(getattr(torch, self.dtype_name), depth or len(self.weights[1]), terms)
        self.bound = (tolerance or rounding) * max(step, 1)
        batches = len(_batches(mine)) or 1
        self.scene = Scene(len(mine), batches, max((len(rank.forwards) for rank in mine), default=1), self.bound)

    def kinds(self) -> Iterator[tuple[str, list[Difference]]]:
        """Yield what is compared, in the order of cause and effect."""
        if self.step == 0:
            yield "start", self._tensors("start", *self.weights, lambda _, *values: causes_of_start(*values))
            return
        yield "data", self._data()
        gradients = self._tensors("gradient", *self.gradients, self._causes)
        losses = self._losses()
        if all(item.relative <= item.bound for item in losses):
            yield "loss", losses
            yield "gradient", gradients
        else:  # a loss that is only told wrong changes no gradient
            yield "gradient", gradients
            yield "loss", losses
        yield "norm", self._norm()
        yield "weight", self._updates()

    # -- parameters -------------------------------------------------------------------------------------------

    def _tensors(
        self,
        kind: str,
        mine: dict[str, Whole],
        theirs: dict[str, Whole],
        causes: Callable[[str, Whole, Tensor], Iterator[str]],
    ) -> list[Difference]:
        floor = FLOOR * norm_of(whole.value for whole in theirs.values())
        differences = []
        for name in dict.fromkeys([*reversed(theirs), *mine] if kind == "gradient" else [*theirs, *mine]):
            item = Difference(kind, self.step, name, bound=self._bound_of(kind, mine.get(name), theirs.get(name)))
            differences.append(item)
            if name not in mine or name not in theirs:
                if kind == "gradient" and not (mine.get(name) or theirs[name]).value.any():
                    item.relative = 0.0  # an absent gradient is zero
                where = "here, but not in the reference" if name in mine else "in the reference, but not here"
                item.lines = [f"it is {where}"]
                continue
            whole = mine[name]
            if whole.shape != theirs[name].shape:
                item.lines = [f"its shape is {list(whole.shape)} here, {list(theirs[name].shape)} in the reference"]
                continue
            value, other = whole.value, theirs[name].value
            spread = max((distance(x.double(), c[0][1].double(), floor) for c in whole.copies.values() for _, x in c))
            apart = distance(value, other, floor)
            item.relative = max(apart, spread)
            if whole.missing:
                item.relative = math.inf
                item.lines.append(f"no rank has {whole.missing:,} of its {value.numel():,} elements")
            elif not item.relative <= item.bound:
                right = apart <= item.bound
                item.lines += [] if right else [_largest(value, other)]
                item.lines += [_RANKS_DIFFER] if right and kind == "start" else filter(None, causes(name, whole, other))
        return differences

    def _bound_of(self, kind: str, mine: Whole | None, theirs: Whole | None) -> float:
        if kind != "start":
            return self.bound
        return max((torch.finfo(whole.dtype).eps for whole in (mine, theirs) if whole is not None), default=0.0)

    def _causes(self, name: str, whole: Whole, reference: Tensor) -> Iterator[str]:
        before = self.before.gradients[1].get(name) if self.before is not None else None
        if before is not None and before.shape == whole.shape:
            old, more = before.value, whole.value - reference
            times = factor_of(more, old)
            if is_factor(times) and distance(more, times * old) <= min(4 * self.bound, 0.1):
                yield "it is the reference's plus the gradient of the step before, which was not cleared"
                return
        yield from causes_of_gradient(whole, reference, self.scene)

    def _updates(self) -> list[Difference]:
        assert self.before is not None
        differences = []
        theirs = self.gradients[1]
        scale = math.sqrt(sum(whole.value.square().mean().item() for whole in theirs.values()) / max(len(theirs), 1))
        for name, reference in self.weights[1].items():
            item = Difference("weight", self.step, name, 0.0, 4 * self.bound)
            differences.append(item)
            whole = self.weights[0].get(name)
            if whole is None or whole.shape != reference.shape:
                item.relative = math.inf
                item.lines = ["it is in the reference, but not here"]
                continue
            weight = self.before.weights[1][name].value
            value, other = whole.value, reference.value
            update, expected = value - self.before.weights[0][name].value, other - weight
            gradient = theirs[name].value if name in theirs else torch.zeros_like(weight)
            limit = NOISE * self.bound * max(gradient.square().mean().sqrt().item(), FLOOR * scale)
            clear = gradient.abs() > limit
            spread = max(distance(x.double(), c[0][1].double()) for c in whole.copies.values() for _, x in c)
            # an update that is smaller than the rounding of its weight cannot be told
            floor = weight.norm().item() * torch.finfo(whole.dtype).eps / item.bound
            item.relative = max(distance(update[clear], expected[clear], floor), spread)
            if not item.relative <= item.bound:
                item.lines = [_largest(value, other)]
                if spread > item.bound:
                    item.lines.append(_RANKS_DIFFER)
                else:
                    item.lines += causes_of_update(update[clear], expected[clear], weight[clear], self.scene)
        return differences

    # -- numbers ----------------------------------------------------------------------------------------------

    def _losses(self) -> list[Difference]:
        """Compare the mean over all tokens.

        Of forwards without counts it is unknown whether they tell means, or shares of the step's loss, as under
        transformers' Trainer: what is nearer counts.
        """
        mine, theirs = _losses_of(self.mine), _losses_of(self.theirs)
        if not mine or not theirs:
            return []
        loss, expected = min(
            ((a, b) for a in _totals(mine) for b in _totals(theirs)), key=lambda pair: abs(pair[0] - pair[1])
        )
        item = Difference("loss", self.step, bound=self.bound)
        item.relative = abs(loss - expected) / abs(expected) if expected else abs(loss)
        if not item.relative <= item.bound:
            item.lines = [f"{loss:.9g} here, {expected:.9g} in the reference"]
            if expected and not abs(loss / expected - 1) <= 0.2:
                item.lines.append(f"it is {words_of_factor(loss / expected, self.scene)}")
        return [item]

    def _norm(self) -> list[Difference]:
        norms = [rank.norm for rank in self.mine if rank.norm is not None]
        if not norms:
            return []
        norm = norm_of(whole.value for whole in self.gradients[0].values())
        worst = max(norms, key=lambda value: abs(value - norm))
        relative = abs(worst - norm) / norm if norm else worst
        item = Difference("norm", self.step, relative=relative, bound=self.bound)
        if not item.relative <= item.bound:
            item.lines = [f"the loop clips by {worst:.9g}, the recorded gradients have {norm:.9g}"]
            item.lines.append(cause_of_norm(worst, self.gradients[0], norm, self.scene))
        return [item]

    # -- samples ----------------------------------------------------------------------------------------------

    def _data(self) -> list[Difference]:
        mine, theirs = _batches(self.mine), _batches(self.theirs)
        wanted = Counter(key for batch in theirs for key in batch)
        taken = Counter(key for batch in mine for key in batch if key in wanted)
        item = Difference("data", self.step, relative=0.0)
        if not taken:
            return []  # no sample in common: ranks have parts of samples, or see activations
        if taken == wanted:
            return [item]
        item.relative = math.inf
        total, missing, twice = wanted.total(), (wanted - taken).total(), (taken - wanted).total()
        foreign = sum(key not in wanted for batch in mine for key in batch)
        item.lines = [f"of {total} samples of the reference's batch {missing} are not in this one"]
        if twice:
            item.lines.append(f"{twice} are in it more often than there")
        if foreign:
            item.lines.append(f"{foreign} samples are only in this one")
        peers = [ranks for ranks in _ranks_by_batch(self.mine) if len(ranks) > 1]
        if peers and missing >= len(mine[0]):
            item.lines.append(
                f"{named_ranks(peers[0])} have the same samples: right for parts of one model, wrong for replicas"
            )
        return [item]

    # -- where ------------------------------------------------------------------------------------------------

    def cause(self, kind: str) -> str:
        if kind != "gradient":
            return ""
        return cause_of_all(*self.gradients, self.scene)

    def mean_of_means(self) -> str:
        """Return a hint where the forwards have different numbers of valid tokens."""
        mine = _losses_of(self.mine)
        if any(count is None for _, count in mine) or len({count for _, count in mine}) < 2:
            return ""
        counts = [f"{count:g}" for _, count in mine if count is not None]
        return (
            f"if the loss is a mean of the forwards' means: they have {', '.join(counts[:8])} valid tokens, so that is "
            f"not the mean over all tokens; divide each sum by the count of the whole batch"
        )

    def outputs(self) -> Outputs:
        """Compare the outputs of modules, sample by sample."""
        return Outputs(self.mine, self.theirs)

    def behind_outputs(self, number: int, is_everywhere: bool) -> list[str]:
        """Return lines about gradients that differ where no output does.

        Args:
            number: outputs that were compared.
            is_everywhere: whether all gradients differ.
        """
        if not number:
            return []
        if not is_everywhere:
            return [f"all {number} outputs of modules agree, so a backward or a sum of gradients is wrong"]
        lines = [f"all {number} outputs of modules agree, all gradients differ: look at the loss function"]
        return lines + [line for line in [self.mean_of_means()] if line]


def _largest(value: Tensor, reference: Tensor) -> str:
    difference = (value - reference).abs().nan_to_num(nan=math.inf)
    index = torch.unravel_index(difference.argmax(), difference.shape)
    at = [int(number) for number in index]
    return f"the largest difference is at {at}: {value[index].item():.9g} here, {reference[index].item():.9g} there"


def _ranks_by_batch(ranks: list[StepRecord]) -> list[list[int]]:
    """Return the ranks with the same samples together."""
    by_batch: dict[tuple[str, ...], list[int]] = {}
    for number, rank in enumerate(ranks):
        by_batch.setdefault(tuple(key for forward in rank.forwards for key in forward.samples), []).append(number)
    return list(by_batch.values())


def _batches(ranks: list[StepRecord]) -> list[list[str]]:
    """Return the samples of each group of ranks with the same ones."""
    groups = _ranks_by_batch(ranks)
    batches = [[key for forward in ranks[group[0]].forwards for key in forward.samples] for group in groups]
    return [batch for batch in batches if batch]


def _losses_of(ranks: list[StepRecord]) -> list[tuple[float, float | None]]:
    """Return loss and count of each forward, of one rank of those with the same samples."""
    forwards: list[Forward] = [forward for group in _ranks_by_batch(ranks) for forward in ranks[group[0]].forwards]
    return [(forward.loss, forward.count) for forward in forwards if forward.loss is not None]


def _totals(losses: list[tuple[float, float | None]]) -> list[float]:
    """Return the mean over all tokens; where a count is missing, the mean over forwards and their sum."""
    values = [loss for loss, _ in losses]
    counts = [count for _, count in losses if count is not None]
    if len(counts) < len(losses) or not sum(counts):
        return [sum(values) / len(values), sum(values)]
    return [sum(loss * count for loss, count in zip(values, counts, strict=True)) / sum(counts)]
