"""What a kind of graph is: a pure function of the number of replicas and the step. No torch."""

from __future__ import annotations

#: (source, to, weight): what ``source`` gives to ``to``, and (source, source, weight) what it keeps; same edges add up
Sends = list[tuple[int, int, float]]


class GraphFamily:
    """Base of the graphs that a config can name. The arguments of ``__init__`` are options of the graph.

    Attributes:
        takes_peers: whether ``peers`` says to how many others a replica sends in a step.
    """

    takes_peers: bool = True

    def most_peers(self, replicas: int) -> int:
        """The largest ``peers`` that it takes."""
        return replicas - 1

    def problems(self, replicas: int) -> list[str]:
        """Why there is no such graph of so many replicas, in words; nothing where there is."""
        return []

    def period(self, replicas: int, peers: int) -> int:
        """Steps after which it repeats."""
        return 1

    def sends(self, replicas: int, step: int, peers: int) -> Sends:
        """All edges of a step (from 0), with what each replica keeps."""
        raise NotImplementedError
