"""The parameters that the collectives of a group move, in their order, which is the same on all of its ranks.

Two weights of one shape travel alike. Where a forward chooses between two modules by its data, ranks that choose
differently would silently get each other's weights, or sums of gradients of both.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Sequence

from colossus.random import hash_key

#: the number of subjects that a group keeps, to report where two ranks diverged
RECENT = 1024
_MASK = (1 << 63) - 1

WHY = (
    "the ranks do not run the same program. Every rank must call the same layers in the same order, with tensors of "
    "the same shapes and dtypes: look for code that depends on the rank or on the data (an `if` in a forward, a batch "
    "of another size, a layer that only some ranks call, other numbers of rows: in place of x[mask] compute all rows "
    "and choose with torch.where). A random choice is the same on all ranks if Python's random or numpy draws it; a "
    "choice by samples may differ between data ranks under parallel.zero = 2 or less"
)


#: key -> subject, for the models of this process
_subjects: weakref.WeakValueDictionary[int, Subject] = weakref.WeakValueDictionary()


class Subject:
    """Parameters whose values, gradients or products a collective moves.

    Attributes:
        key: a number that stands for the name on all ranks.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.name = ", ".join(names[:2]) + (f" and {len(names) - 2} more" if len(names) > 2 else "")
        self.key = hash_key(*names)
        _subjects[self.key] = self


class Program:
    """The record of the parameters that the collectives of one group have moved on this rank.

    Attributes:
        key: key of the newest subject; 0 before the first.
        digest: hash of all subjects in their order.
        count: number of subjects.
        recent: the newest subjects.
    """

    def __init__(self) -> None:
        self.key = self.digest = self.count = 0
        self.recent: deque[Subject] = deque(maxlen=RECENT)

    def note(self, subject: Subject) -> None:
        """Record that the next collectives move ``subject``."""
        self.key = subject.key
        self.digest = (self.digest * 1_000_003 + subject.key) & _MASK
        self.count += 1
        self.recent.append(subject)

    def names(self) -> dict[int, str]:
        """Return the newest subjects by their numbers, from 0."""
        return {self.count - len(self.recent) + index: subject.name for index, subject in enumerate(self.recent)}


def subject_name(key: int) -> str:
    """Return the name of another rank's subject if this rank knows it, else "something else"."""
    return _subjects[key].name if key in _subjects else "something else"
