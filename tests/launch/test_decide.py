"""What follows the end of an attempt, as a table: a restart, from where and on which nodes, or a stop with a code."""

from __future__ import annotations

import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from colossus.config import load_config
from colossus.config.sections import RestartsSection
from colossus.context.grid import build_grid
from colossus.engine.rollback import Rollback
from colossus.launch.decide import Restart, Stop, decide
from colossus.launch.ends import AttemptEnd, NodeEnd, RankEnd
from colossus.launch.report import report

NOW = 1e4
PLAIN = load_config(dict(parallel=dict(data=2)))
SAVES = load_config(dict(parallel=dict(data=2), checkpoint=dict(every=5)))

GOOD = RankEnd(0, 0, kind="finished")
DEAD = RankEnd(0, -9)
STOPPED = RankEnd(0, 143, after_stop=True)
STOPPED_ITSELF = RankEnd(0, 143)
VICTIM = RankEnd(1, 1, kind="communication", type="PeerGone", step=4)
STUCK = RankEnd(1, 143, after_stop=True, kind="stuck", type="Stuck", step=4)
STARTS = RankEnd(1, 143, after_stop=True, kind="stuck", type="Stuck")
UNSAVED = RankEnd(1, 143, after_stop=True, kind="error", type="CheckpointError", after_signal=15, step=4)


def raised(type_: str = "ValueError", message: str = "boom", step: int | None = 4, **more: Any) -> RankEnd:
    return RankEnd(0, 1, kind="error", type=type_, message=message, step=step, **more)


def past(error: RankEnd | None = None, ended: float = NOW - 10.0, counts: bool = True) -> Restart:
    return Restart(count=int(counts), error=error and error.error, ended=ended)


def restart(*rollback: Rollback, **facts: Any) -> Restart:
    return Restart(*rollback, **facts, ended=NOW)


def of(*ranks: RankEnd, **more: Any) -> AttemptEnd:
    facts: dict[str, Any] = {"config": PLAIN, "folder": Path("run"), **more}
    return AttemptEnd({end.rank: end for end in ranks}, **facts)


def node(rank: int, end: RankEnd, **more: Any) -> dict[int, NodeEnd]:
    return {1: NodeEnd({rank: end}, **more)}


LEAVES = node(1, STOPPED_ITSELF, signum=signal.SIGTERM, leaves=True)
REGROUPS = node(1, STOPPED_ITSELF, regroups=True)
ONCE = restart(count=1)
AGAIN = restart(count=1, error=raised().error)

#: what is seen -> the decision of a run that may be restarted three times, without and with a history
ENDS: list[tuple[AttemptEnd, Restart | Stop]] = [
    (of(GOOD), Stop(0)),
    (of(), ONCE),
    # failures
    (of(DEAD), ONCE),
    (of(RankEnd(0, 0)), ONCE),  # os._exit(0) before the end of the program
    (of(raised(), VICTIM), AGAIN),
    (of(DEAD, VICTIM), ONCE),
    (of(GOOD, VICTIM), ONCE),
    (of(STUCK), ONCE),
    (of(GOOD, server="server 1 (host a) was killed"), ONCE),
    (of(raised(), config=None, folder=None), Stop(1)),
    (of(RankEnd(0, 2, kind="config", message="data: no such file")), Stop(2)),
    # those that would come again
    (of(raised("NonFiniteGradients")), Stop(1, "the same step would have the same gradients; train.on_nonfinite=")),
    (of(raised("LossSpike")), Stop(1, "the same batches would have the same loss; train.on_spike.action=rollback")),
    (of(raised("ReplicasDiffer")), Stop(1, "checkpoints since then may differ, too; train.on_mismatch=restart goes")),
    # those that go back
    (
        of(raised("LossSpike", rollback=(5, None))),
        restart(Rollback(5, None, NOW), count=1, error=raised("LossSpike").error),
    ),
    (
        of(raised("ReplicasDiffer", rollback=[6, 0])),
        restart(Rollback(6, 0, NOW), count=1, error=raised("ReplicasDiffer").error),
    ),
    # stops
    (of(STOPPED, signum=signal.SIGTERM), Stop(143)),
    (of(STOPPED_ITSELF, VICTIM), Stop(143)),  # SLURM has told one rank
    (of(RankEnd(0, -15), VICTIM), Stop(143)),
    (of(STOPPED, VICTIM), ONCE),  # was only ended by us
    (of(raised(), signum=signal.SIGINT), Stop(130)),
    (of(raised(), late_signum=signal.SIGINT), Stop(1)),
    (of(signum=signal.SIGHUP, folder=None), Stop(129)),
    # stops that lose steps
    (of(STOPPED, signum=signal.SIGTERM, config=SAVES), Stop(143)),
    (of(STOPPED, signum=signal.SIGTERM, config=SAVES, unsaved_step=7), Stop(1)),
    (of(STOPPED, signum=signal.SIGTERM, config=SAVES, unsaved_step=7, is_hurried=True), Stop(143)),
    (of(STOPPED, node=0, others=node(1, STOPPED, signum=2, is_hurried=True), config=SAVES, unsaved_step=7), Stop(130)),
    (of(STOPPED, signum=signal.SIGTERM, unsaved_step=7), Stop(143)),
    (of(STOPPED, STUCK, signum=signal.SIGTERM, config=SAVES), Stop(1)),
    (of(STOPPED, STARTS, signum=signal.SIGTERM, config=SAVES), Stop(143)),
    (of(STOPPED, UNSAVED, signum=signal.SIGTERM, config=SAVES), Stop(1)),
    (of(STOPPED, replace(UNSAVED, kind="communication"), signum=signal.SIGTERM, config=SAVES), Stop(143)),
    # nodes
    (of(GOOD, node=0, others=node(1, GOOD)), Stop(0)),
    (of(VICTIM, node=0, gone={1: "node 1 (host b)"}), ONCE),
    (of(raised(), node=0, gone={1: "node 1 (host b)"}), AGAIN),
    (of(GOOD, node=0, gone={1: "node 1 (host b)"}), ONCE),
    (of(STOPPED, node=0, others=node(1, DEAD)), restart(nodes=(0, 1), count=1)),
    (of(STOPPED, node=0, others=node(1, STOPPED, signum=signal.SIGINT)), Stop(130)),
    (of(STOPPED, node=0, others=REGROUPS), restart(nodes=(0, 1))),
    (of(STOPPED, node=0, regroups=True), restart()),
    (of(STOPPED, STARTS, node=0, regroups=True), restart()),
    (of(STOPPED, STUCK, node=0, regroups=True), ONCE),
    (of(STOPPED, node=0, others=node(1, DEAD, regroups=True)), restart(nodes=(0, 1), count=1)),
    (of(STOPPED, node=0, others=REGROUPS, gone={2: "node 2 (host c)"}), restart(nodes=(0, 1), count=1)),
    (of(STOPPED, node=0, others=REGROUPS, late_signum=signal.SIGINT), Stop(143)),
    (of(STOPPED, node=0, others=node(1, STOPPED_ITSELF, regroups=True, late_signum=signal.SIGINT)), Stop(143)),
    (of(raised(), node=0, others=node(1, VICTIM, late_signum=signal.SIGINT)), Stop(1)),
    (of(GOOD, node=0, others=node(1, GOOD, regroups=True)), Stop(0)),  # through
    (of(STOPPED, node=0, others=LEAVES), restart()),
    (of(STOPPED, node=0, others=LEAVES, signum=signal.SIGTERM), Stop(143)),
    (of(STOPPED, node=1, leaves=True, signum=signal.SIGTERM), Stop(143)),
    (of(GOOD, node=0, others=node(1, GOOD, signum=signal.SIGTERM, leaves=True)), Stop(0)),
]


@pytest.mark.parametrize(("end", "decision"), ENDS, ids=[str(number) for number in range(len(ENDS))])
def test_what_follows(end: AttemptEnd, decision: Restart | Stop, capsys: pytest.CaptureFixture[str]) -> None:
    decided = decide(end, [], RestartsSection(max=3), NOW)
    if isinstance(decision, Stop):
        assert isinstance(decided, Stop)
        assert (decided.code, decided.reason[: len(decision.reason)]) == (decision.code, decision.reason)
    else:
        assert decided == decision
    if isinstance(decision, Restart) and not decision.count:
        assert decide(end, [], None, NOW) == decision, "nodes join and leave without being counted"
    else:
        code = decided.code if isinstance(decided, Stop) else 1
        assert decide(end, [], None, NOW) == Stop(code)
    report(end, decided, PLAIN, build_grid(PLAIN.parallel), 3)
    printed = "".join(capsys.readouterr())
    assert bool(printed) == (decided != Stop(0))
    assert ("restart 1 of 3: the ranks start again" in printed) == (isinstance(decided, Restart) and decided.count == 1)


@pytest.mark.parametrize(
    ("end", "history", "limits", "decision"),
    [
        (raised(), [past(raised())], dict(max=9), Stop(1, "rank 0 has raised the same error in step 4 before")),
        (
            raised(),
            [past(raised(), counts=False)],
            dict(max=9),
            Stop(1, "rank 0 has raised the same error in step 4"),
        ),
        (
            raised(step=None),
            [past(raised(step=None))],
            dict(max=9),
            Stop(1, "rank 0 has raised the same error before"),
        ),
        (raised(), [past(raised(step=5)), past(raised(message="bang"))], dict(max=9), 3),
        (DEAD, [past(), past()], dict(max=9), 3),
        (DEAD, [past(), past()], dict(max=2), Stop(1, "2 of launch.restarts.max = 2 are used")),
        (DEAD, [past(), past(counts=False)], dict(max=2), 2),
        (DEAD, [past(ended=NOW - 3601.0), past()], dict(max=2, within="1h"), 2),
        (DEAD, [past(ended=NOW - 3599.0), past()], dict(max=2, within="1h"), Stop(1, "2 of launch.restarts.max = 2")),
        (DEAD, [], dict(max=0), Stop(1)),
    ],
)
def test_what_follows_after_others(
    end: RankEnd, history: list[Restart], limits: dict[str, Any], decision: int | Stop
) -> None:
    decided = decide(of(end), history, RestartsSection(**limits), NOW)
    if isinstance(decision, Stop):
        assert isinstance(decided, Stop)
        assert (decided.code, decided.reason[: len(decision.reason)]) == (decision.code, decision.reason)
    else:
        assert isinstance(decided, Restart)
        assert decided.count == decision
