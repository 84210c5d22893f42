"""What launchers and ranks tell each other, in a store that a launcher holds, of replicas that died.

A launcher posts a death. The replicas that live answer each with the first step of which it has sent nothing yet; the
largest of these is the step from which on all of them go on without the dead (`engine/strategies/living.py`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torch import distributed as dist

#: environment variable of ranks whose launcher goes on without replicas that die: host:port of the store
DEATH_STORE = "COLOSSUS_DEATH_STORE"
OPEN = "open"


@dataclass(frozen=True)
class Death:
    """Replicas that died together.

    Attributes:
        number: from 1.
        replicas: indices along data.
        reason: what is known of it, in words.
    """

    number: int
    replicas: tuple[int, ...]
    reason: str


class DeathBoard:
    """The keys of a store, which is nobody else's.

    Args:
        store: a client of torch's TCPStore, which no other thread waits in.
    """

    def __init__(self, store: Any) -> None:
        self._store = store

    # -- launchers ----------------------------------------------------------------------------------------

    def num_begun(self) -> int:
        """How many ranks have trained a step."""
        return int(self._store.add("begun", 0))

    def claim(self, replica: int) -> bool:
        """Whether this launcher is the one to post the death of a replica: the first that asks."""
        return bool(self._store.add(f"claim/{replica}", 1) == 1)

    def post(self, replicas: Sequence[int], reason: str) -> None:
        """Tell all that replicas have died. Those that are dead stay dead."""
        number = self._store.add("numbers", 1)
        self._store.set(f"death/{number}", json.dumps([list(replicas), reason]))
        self._store.add("deaths", 1)

    def num_settled(self, number: int) -> int:
        """How many ranks go on without the replicas of a death already."""
        return int(self._store.add(f"settled/{number}", 0))

    def settlement(self, number: int) -> dict[str, Any] | None:
        """What the ranks have told of how they went on after a death."""
        key = f"told/{number}"
        return json.loads(self._store.get(key)) if self._store.check([key]) else None

    # -- ranks --------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """This rank has trained a step: from now on others can go on without it."""
        self._store.add("begun", 1)

    def num_deaths(self) -> int:
        return int(self._store.add("deaths", 0))

    def death(self, number: int) -> Death:
        replicas, reason = json.loads(self._store.get(f"death/{number}"))
        return Death(number, tuple(replicas), reason)

    def answer(self, number: int, replica: int, answer: Mapping[str, Any]) -> None:
        """What a replica that lives answers to a death."""
        self._store.set(f"answer/{number}/{replica}", json.dumps(answer))

    def answers(self, number: int, replicas: Sequence[int]) -> list[dict[str, Any]] | None:
        """Of these replicas, once all have answered."""
        keys = [f"answer/{number}/{replica}" for replica in replicas]
        return [json.loads(text) for text in self._store.multi_get(keys)] if self._store.check(keys) else None

    def settle(self, number: int) -> None:
        """This rank goes on without the replicas of a death."""
        self._store.add(f"settled/{number}", 1)

    def tell(self, number: int, told: Mapping[str, Any]) -> None:
        """For the report: ``step``, ``graph`` and ``mass`` of a death."""
        self._store.set(f"told/{number}", json.dumps(told))

    def post_completed(self, replica: int, completed: int) -> None:
        """How many steps a replica has completed, now and then."""
        self._store.set(f"completed/{replica}", str(completed))

    def completed(self, replica: int) -> int | None:
        """The last that a replica has posted, None where it posts none."""
        key = f"completed/{replica}"
        return int(self._store.get(key)) if self._store.check([key]) else None

    # -- meetings -----------------------------------------------------------------------------------------

    def arrive(self, meeting: str, replica: int) -> None:
        """A replica has come to a meeting, and begins nothing together with others before its gate is decided."""
        self._store.set(f"arrived/{meeting}/{replica}", "")

    def have_arrived(self, meeting: str, replicas: Sequence[int]) -> bool:
        """Whether all of these have come."""
        return bool(self._store.check([f"arrived/{meeting}/{replica}" for replica in replicas]))

    def decide(self, meeting: str, outcome: str) -> None:
        """`OPEN`, or the number of a death that comes first; whoever decides first is right for all."""
        self._store.compare_set(f"gate/{meeting}", "", outcome)

    def decision(self, meeting: str) -> str | None:
        key = f"gate/{meeting}"
        return self._store.get(key).decode() if self._store.check([key]) else None


def connect(address: str, timeout: timedelta) -> DeathBoard:
    """The board in the store at ``host:port``, on a connection of its own."""
    host, _, port = address.rpartition(":")
    store = dist.TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=timeout)
    return DeathBoard(dist.PrefixStore("colossus/deaths", store))
