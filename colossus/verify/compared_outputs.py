"""Outputs of modules in two records, sample by sample, and the first that differs."""

from __future__ import annotations

from collections.abc import Iterable

from colossus.arithmetic import named_ranks
from colossus.verify.record_folder import StepRecord


class Outputs:
    """Outputs of modules that both records have, in the order of the calls.

    Args:
        mine: the ranks of the record in question.
        theirs: those of the record that is taken as right.

    Attributes:
        apart: title of a call -> rank -> largest relative difference of a sample.
    """

    def __init__(self, mine: Iterable[StepRecord], theirs: Iterable[StepRecord]) -> None:
        self.apart: dict[str, dict[int, float]] = {}
        rows: dict[tuple[str, str], tuple[list[int], list[float]]] = {}
        for rank in theirs:
            for forward in rank.forwards:
                for title, (shape, values) in forward.outputs.items():
                    for key, row in zip(forward.samples, values, strict=True):
                        rows[title, key] = shape, row
        for number, rank in enumerate(mine):
            for forward in rank.forwards:
                for title, (shape, values) in forward.outputs.items():
                    for key, row in zip(forward.samples, values, strict=True):
                        other_shape, other = rows.get((title, key), ([], []))
                        if other and other_shape == shape:
                            self._add(title, number, row, other)

    def _add(self, title: str, rank: int, row: list[float], reference: list[float]) -> None:
        """Compare a sample's fingerprints of an output."""
        largest = max(abs(a - b) for a, b in zip(row, reference, strict=True)) / (abs(reference[0]) or 1.0)
        of_ranks = self.apart.setdefault(title, {})
        of_ranks[rank] = max(of_ranks.get(rank, 0.0), largest)

    def first_that_differs(self, bound: float, world: int) -> list[str]:
        """Return lines about the first output that differs behind the last that agrees; none where that is the last.

        Inside of a module that ranks share an output may be a part or a partial sum, which differs and is right.
        """
        titles = list(self.apart)
        agree = [number for number, title in enumerate(titles) if max(self.apart[title].values()) <= bound]
        first = agree[-1] + 1 if agree else 0
        if first == len(titles):
            return []
        of_ranks = {rank: value for rank, value in self.apart[titles[first]].items() if value > bound}
        ranks = "" if len(of_ranks) == world else f" on {named_ranks(sorted(of_ranks))}"
        lines = [f"the first output that differs is that of {titles[first]}{ranks}, by {max(of_ranks.values()):.2g}"]
        return lines + ([f"the last that agrees before it is that of {titles[first - 1]}"] if first else [])
