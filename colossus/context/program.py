"""The names of what the collectives of a group move, in their order, which is the same on all of its ranks.

Two weights of one shape travel alike. Where a forward chooses between two modules by its data, ranks that choose
differently would get each other's weights, or sums of gradients of both, in silence.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Sequence

from colossus.random import hash_key

#: the subjects that a group keeps, to say where two ranks went apart
RECENT = 1024
_MASK = (1 << 63) - 1

WHY = (
    "the ranks do not run the same program. Every rank must call the same layers in the same order, with tensors of "
    "the same shapes and dtypes: look for what depends on the rank or on the data (an `if` in a forward, a batch of "
    "another size, a layer that only some ranks call, other numbers of rows: in place of x[mask] compute all rows and "
    "choose with torch.where). What chance chooses is the same on all ranks when Python's random or numpy draws it; "
    "what samples choose may differ between data ranks under parallel.zero = 2 or less"
)


#: by key, those of the models of this process
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
    """The record of what the collectives of one group have moved on this rank.

    Attributes:
        key: of the newest subject; 0 before the first.
        digest: of all subjects in their order.
        count: how many they were.
        recent: the newest of them.
    """

    def __init__(self) -> None:
        self.key = self.digest = self.count = 0
        self.recent: deque[Subject] = deque(maxlen=RECENT)

    def note(self, subject: Subject) -> None:
        """The collectives that follow are of ``subject``."""
        self.key = subject.key
        self.digest = (self.digest * 1_000_003 + subject.key) & _MASK
        self.count += 1
        self.recent.append(subject)

    def names(self) -> dict[int, str]:
        """The newest subjects by their numbers, from 0."""
        return {self.count - len(self.recent) + index: subject.name for index, subject in enumerate(self.recent)}


def subject_name(key: int) -> str:
    """The name of a subject that another rank is at, as far as this one has it."""
    return _subjects[key].name if key in _subjects else "something else"
