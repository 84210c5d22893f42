"""How a run ended, as one launcher knows it. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from colossus.launch.causes import RankExit
from colossus.launch.nodes import NodeEnd
from colossus.launch.server_failure import ServerFailure


@dataclass
class Outcome:
    """How this node's ranks ended.

    Attributes:
        exits: global rank -> how its process ended.
        signum: the signal the launcher itself received, None when the ranks ended otherwise.
        is_hurried: a second Ctrl-C has asked to end without a checkpoint.
        folder: the run folder all nodes agreed on, None before they have.
        others: how the ranks of other nodes ended, as far as they have said.
        gone: the nodes that give no sign of life any more, in words.
        server: the parameter server whose failure has ended the run.
        endpoints: of all parameter servers.
    """

    folder: Path | None = None
    exits: dict[int, RankExit] = field(default_factory=dict)
    signum: int | None = None
    is_hurried: bool = False
    others: Sequence[NodeEnd] = ()
    gone: Sequence[str] = ()
    server: ServerFailure | None = None
    endpoints: Sequence[Mapping[str, Any]] = ()
