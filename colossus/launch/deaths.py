"""What becomes of a run in which a rank has died by itself: it ends, or goes on without the rank's replica. No torch.

It goes on where ``parallel.strategy.on_death`` is "continue", one death at a time, unless replicas need nobody between
their meetings: then as many may die as leave one. The other ranks of the replica are
ended: they would wait in its collectives. All other ranks hear of the death through the `DeathBoard`.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from colossus.context.grid import RankGrid
from colossus.launch import causes
from colossus.launch.causes import CULPRITS, RankExit
from colossus.launch.failure import FailureRecord

if TYPE_CHECKING:
    from colossus.context.death_board import DeathBoard

FILE = "deaths.json"
"""In the run folder: the replicas that the run went on without."""

_RECORD_SECONDS = 0.5
"""From the first failed rank to the verdict: others may be about to fail for the same reason, and to say why."""

_HEARSAY_SECONDS = 3.0
"""For which a node whose ranks were only victims waits to hear of the culprit on another node."""


@dataclass(frozen=True)
class Loss:
    """Replicas that the run goes on without.

    Attributes:
        number: of the death on the board.
        ranks: all of theirs.
        reason: in words.
    """

    number: int
    replicas: tuple[int, ...]
    ranks: tuple[int, ...]
    reason: str


class Deaths:
    """Of one launcher, which looks at the ranks of its node.

    Args:
        here: the ranks of this node.
        records: reads those of this node's ranks.
        are_independent: replicas need nobody between their meetings.

    Attributes:
        losses: what the run goes on without.
        verdict: why the run cannot go on; None while it can.
        has_culprit: whether a rank here has failed by itself, not of another or of a stop.
        is_stopping: all were told to stop: to be set then.
    """

    def __init__(
        self,
        grid: RankGrid,
        here: Sequence[int],
        board: DeathBoard,
        records: Callable[[], Iterable[FailureRecord]],
        *,
        are_independent: bool = False,
    ) -> None:
        self._are_independent = are_independent
        self._grid, self._here, self._board, self._records = grid, list(here), board, records
        self.losses: list[Loss] = []
        self.verdict: str | None = None
        self.has_culprit = False
        self.is_stopping = False
        self._suspected: float | None = None
        self._errors: set[tuple[str, str]] = set()

    @property
    def lost(self) -> set[int]:
        """Ranks that the run goes on without."""
        return {rank for loss in self.losses for rank in loss.ranks}

    def look(self, exits: Mapping[int, RankExit], gone: Sequence[tuple[str, Sequence[int]]] = ()) -> list[int]:
        """Look at what has ended, and hear of other nodes; `verdict` says when the run is over.

        Args:
            exits: of this node's ranks that have ended.
            gone: nodes that give no sign of life, in words, and their ranks.

        Returns:
            The ranks of this node that are to be ended: those of replicas that are lost.
        """
        self._hear()
        if self.verdict is not None:
            return []
        for name, ranks in gone:
            replicas = sorted({self._replica(rank) for rank in ranks} - self._lost_replicas)
            if replicas and not self._refuse(replicas):
                self._post(replicas, f"{_named(replicas)} went with {name}, which gives no sign of life")
        failed = [rank for rank, ended in exits.items() if rank not in self.lost and not self._is_good(ended)]
        if failed:
            self._judge(failed, exits)
        else:
            self._suspected = None
        self._hear()
        return [rank for rank in self._here if rank in self.lost and rank not in exits]

    @property
    def is_suspicious(self) -> bool:
        """Whether a rank has failed of which it is not said yet what becomes of it."""
        return self._suspected is not None

    def is_settled(self, loss: Loss) -> bool:
        """Whether all that live go on without it."""
        return self._board.num_settled(loss.number) >= self._num_living(loss.number)

    # -- the verdict --------------------------------------------------------------------------------------

    def _judge(self, failed: Sequence[int], exits: Mapping[int, RankExit]) -> None:
        now = time.monotonic()
        self._suspected = self._suspected or now
        failed_replicas = {self._replica(rank) for rank in failed}
        theirs = [rank for rank in self._here if self._replica(rank) in failed_replicas]
        if now - self._suspected < _RECORD_SECONDS:
            return
        own = {rank: exits[rank] for rank in theirs if rank in exits}
        records = [record for record in self._records() if record.rank in own]
        found = causes.rank_causes(records, own)
        if not found:
            self.verdict = "a rank was told to stop"
            return
        first = found[0]
        self.has_culprit |= first.kind in CULPRITS
        if first.kind not in CULPRITS:
            if first.record is not None and first.record.server is not None:
                self.verdict = f"rank {first.rank} lost a parameter server"
                return
            if self._open_losses:
                self.verdict = self._in_common(self._open_losses[0].replicas, failed_replicas)
            elif now - self._suspected > _HEARSAY_SECONDS or self._grid.world_size == len(self._here):
                self.verdict = f"rank {first.rank} could not go on although no rank of its replica had died"
            return
        if first.record is not None and first.record.kind == "config":
            self.verdict = f"rank {first.rank} found a mistake in the config, which all have"
            return
        error = None if first.record is None else (first.record.type, first.record.message)
        if error in self._errors:
            self.verdict = f"rank {first.rank} raised the same error as a replica before: all have it"
            return
        replicas = sorted({self._replica(cause.rank) for cause in found if cause.kind in CULPRITS})
        if self._refuse(replicas):
            return
        if victims := failed_replicas - set(replicas):
            self.verdict = self._in_common(replicas, victims)
            return
        if error is not None:
            self._errors.add(error)
        ends = [causes.in_one_line(cause, self._grid) for cause in found if cause.kind in CULPRITS]
        self._post(replicas, f"{_named(replicas)} died: {'; '.join(ends)}")

    def _refuse(self, replicas: Sequence[int]) -> bool:
        """Whether the run cannot go on without these."""
        rule = "a run goes on after one death at a time"
        are_several = len(replicas) > 1 and not self._are_independent and not self._are_one_node(replicas)
        if len(replicas) + len(self._lost_replicas) >= self._grid.size("data") and not are_several:
            self.verdict = "no other replica is left"
        elif self._board.num_begun() < self._grid.world_size:
            self.verdict = "not all ranks had trained a step yet, and until then they start together"
        elif are_several:
            self.verdict = f"{_named(replicas)} failed at the same time: {rule}"
        elif self._open_losses and not self._are_independent:
            self.verdict = (
                f"{_named(replicas)} failed before all others had gone on without "
                f"{_named(self._open_losses[0].replicas)}: {rule}"
            )
        return self.verdict is not None

    @property
    def _open_losses(self) -> list[Loss]:
        return [loss for loss in self.losses if not self.is_settled(loss)]

    def _in_common(self, dead: Sequence[int], victims: Iterable[int]) -> str:
        return (
            f"{_named(dead)} died in the midst of an evaluation, a checkpoint or a sum over all replicas, and what "
            f"{_named(sorted(victims))} did together with it broke off"
        )

    def _are_one_node(self, replicas: Sequence[int]) -> bool:
        return not any(self._replica(rank) in replicas for rank in self._here)

    def _post(self, replicas: Sequence[int], reason: str) -> None:
        mine = [replica for replica in replicas if self._board.claim(replica)]
        if mine:
            self._board.post(mine, reason)
            if self._are_independent:
                print(f"colossus: {reason}; the others go on", file=sys.stderr, flush=True)
        self._suspected = None

    def _hear(self) -> None:
        for number in range(len(self.losses) + 1, self._board.num_deaths() + 1):
            death = self._board.death(number)
            ranks = tuple(rank for rank in range(self._grid.world_size) if self._replica(rank) in death.replicas)
            self.losses.append(Loss(number, death.replicas, ranks, death.reason))

    @property
    def _lost_replicas(self) -> set[int]:
        return {replica for loss in self.losses for replica in loss.replicas}

    def _num_living(self, number: int) -> int:
        lost = {rank for loss in self.losses for rank in loss.ranks if loss.number <= number}
        return self._grid.world_size - len(lost)

    def _is_good(self, ended: RankExit) -> bool:
        if self.is_stopping and ended.is_finished and ended.code in causes.STOP_CODES:
            return True
        return ended.code == 0 and not ended.is_early

    def _replica(self, rank: int) -> int:
        return self._grid.index(rank, "data")

    # -- the report ---------------------------------------------------------------------------------------

    def told(self) -> list[dict[str, Any]]:
        """Each loss with what the ranks have told of it, as JSON can hold it."""
        rows = []
        for loss in self.losses:
            row: dict[str, Any] = {"replicas": list(loss.replicas), "ranks": list(loss.ranks), "reason": loss.reason}
            told = self._board.settlement(loss.number) or {}
            told_of = {"first_step_without": told.get("step"), "graph": told.get("graph")}
            rows.append({**row, **told_of, "push_sum_weight": told.get("mass")})
        return rows


def write(folder: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    (folder / FILE).write_text(json.dumps(list(rows), indent=2) + "\n")


def read(folder: Path) -> list[dict[str, Any]]:
    """What `write` has written, nothing where no replica has died."""
    try:
        rows = json.loads((folder / FILE).read_text())
    except (OSError, ValueError):
        return []
    return rows if isinstance(rows, list) else []


def report(rows: Sequence[Mapping[str, Any]], samples_per_step: int, last_step: int | None) -> str:
    """What the user reads at the end.

    Args:
        samples_per_step: of one replica.
        last_step: of the run.
    """
    lines = []
    for row in rows:
        start = row["first_step_without"]
        line = row["reason"]
        if start is None:
            lines.append(f"{line}; the others had nothing left to do together")
            continue
        it, its = ("them", "their") if len(row["replicas"]) > 1 else ("it", "its")
        about = "" if row["graph"] is not None else "about "  # replicas that need nobody tell it ten times a second
        line += f"; the others went on without {it} from {about}step {start}"
        line += f" (graph: {row['graph']})" if row["graph"] is not None else ""
        if last_step is not None:
            num_samples = max(0, last_step - start + 1) * samples_per_step * len(row["replicas"])
            line += f", {about}{num_samples} samples of {its} share were not trained on"
        if row["push_sum_weight"] is not None:
            line += f", push-sum weight {row['push_sum_weight']:.4g} was renounced"
        lines.append(line)
    return "\n".join(f"colossus: {line}" for line in lines)


def _named(replicas: Sequence[int]) -> str:
    return f"replica{'s' * (len(replicas) > 1)} {', '.join(map(str, replicas))}"
