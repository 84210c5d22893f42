"""The decision at the end of an attempt: whether another one follows, from where and on which nodes. No torch.

It depends on nothing but its arguments, so that the launchers of all nodes, which exchange their ends (`NodeEnd`),
decide alike. Some facts are a node's own: its clock, which `RestartsSection.within` is compared with; the nodes that
are silent towards it (``gone``); a signal that comes when it has reported its end; the last step that its view of the
run folder has (``unsaved_step``, which changes only the exit code of a stop). Where only one node therefore stops, it
closes the rendezvous, and the others end, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from colossus.checkpoint.errors import CheckpointError
from colossus.config.sections import RestartsSection
from colossus.engine.rollback import Rollback
from colossus.launch.ends import AttemptEnd, RankEnd, stop_code

DONE, FAILED, USAGE = 0, 1, 2

#: errors that would recur, or that a later checkpoint may contain -> the reason against a restart without rollback
_NEED_ROLLBACK = {
    "NonFiniteGradients": "the same step would have the same gradients; train.on_nonfinite=skip leaves it out",
    "ReplicasDiffer": "checkpoints since then may differ, too; train.on_mismatch=restart goes back before it",
    "LossSpike": "the same batches would have the same loss; train.on_spike.action=rollback leaves them out",
}


@dataclass(frozen=True)
class Restart:
    """Another attempt follows.

    Attributes:
        rollback: the steps and batches that it leaves out; None: it resumes from the newest checkpoint.
        nodes: the numbers of the nodes that go on; others may join.
        count: the number of restarts that count so far, this one included; 0 where nodes join or leave.
        error: the `RankEnd.error` of the culprit, if it raised one.
        ended: the time of the decision, in seconds since the epoch.
    """

    rollback: Rollback | None = None
    nodes: tuple[int, ...] = (0,)
    count: int = 0
    error: tuple[str, str, int | None] | None = None
    ended: float = field(compare=False, kw_only=True)


@dataclass(frozen=True)
class Stop:
    """No attempt follows.

    Attributes:
        code: the exit code of the launcher.
        reason: the reason why a run with restarts is not restarted; empty where none is to be given.
    """

    code: int
    reason: str = ""


def decide(end: AttemptEnd, history: Sequence[Restart], limits: RestartsSection | None, now: float) -> Restart | Stop:
    """Decide what follows the end of an attempt.

    Args:
        end: the end.
        history: the decisions before it.
        limits: the config's ``launch.restarts``.
        now: seconds since the epoch.
    """
    nodes = tuple(sorted({end.node or 0, *(node for node, other in end.others.items() if not other.leaves)}))
    if _regroups(end):
        return Restart(nodes=nodes, ended=now)
    code = _exit_code(end)
    if code != FAILED or limits is None or not limits.max or end.folder is None:
        return Stop(code)
    if _is_stopped(end):
        return Stop(code)
    culprit = next(iter(end.failed), None)
    recent = [past for past in history if past.count and (limits.within is None or now - past.ended < limits.within)]
    reason = _reason_against(culprit, history) if culprit is not None and culprit.cause == "error" else ""
    if not reason and len(recent) >= limits.max:
        reason = f"{len(recent)} of launch.restarts.max = {limits.max} are used"
    if reason:
        return Stop(code, reason)
    rollback, error = None, None
    if culprit is not None and culprit.rollback is not None:
        until, skip_batches, *_ = culprit.rollback
        rollback = Rollback(until, skip_batches, now)
    if culprit is not None and culprit.cause == "error":
        error = culprit.error
    return Restart(rollback, nodes, len(recent) + 1, error, ended=now)


def _regroups(end: AttemptEnd) -> bool:
    """Return whether the ranks were stopped because nodes join or leave, and no rank failed.

    A rank that is stopped before its first step has a record, but has not failed.
    """
    if not any(node.regroups or node.leaves for node in end.nodes) or end.gone:
        return False
    staying = [end, *(node for node in end.others.values() if not node.leaves)]
    if any(node.is_stopped for node in staying):
        return False
    return stop_code(rank for rank in end.all_ranks if not rank.is_of_start_up) is not None


def _is_stopped(end: AttemptEnd) -> bool:
    """Return whether a signal has asked for the end of the run, even if it failed while it ended."""
    is_stop = end.dead_server is None and not end.gone and stop_code(end.all_ranks) is not None
    return is_stop or any(node.is_stopped for node in end.nodes)


def _exit_code(end: AttemptEnd) -> int:
    if end.dead_server is not None:
        return FAILED
    if (code := end.stop_code) is not None:
        return FAILED if lost_by_stop(end) is not None else code
    ranks, causes = end.all_ranks, end.failed
    if not end.gone and ranks and all(rank.is_good for rank in ranks):
        return DONE
    if end.gone and not (causes and causes[0].is_own):
        return FAILED
    return USAGE if causes and causes[0].kind == "config" else FAILED


def lost_by_stop(end: AttemptEnd) -> list[RankEnd] | None:
    """Return the ranks because of which a stop has lost steps that were to be saved; None where none is lost."""
    if end.config is None or not end.config.checkpoint.every or end.folder is None:
        return None
    if any(node.is_hurried for node in end.nodes):
        return None
    causes = end.failed
    # a save that failed because another rank has ended is not the cause
    unsaved = [rank for rank in causes if rank.type == CheckpointError.__name__ and rank.kind != "communication"]
    # a rank that is stopped before its first step has a record of kind "stuck", too, but no step
    culprits = [
        rank for rank in causes if rank.cause in ("death", "stuck") and (not rank.has_record or rank.step is not None)
    ]
    if unsaved or culprits or end.unsaved_step is not None:
        return unsaved or culprits or causes
    return None


def _reason_against(culprit: RankEnd, history: Sequence[Restart]) -> str:
    """Return why another attempt would end like this one, or an empty text where nothing suggests it."""
    if culprit.type in _NEED_ROLLBACK and culprit.rollback is None:
        return _NEED_ROLLBACK[culprit.type]
    if culprit.error in [past.error for past in history]:
        when = f"in step {culprit.step}" if culprit.step is not None else "before the first step"
        return f"rank {culprit.rank} has raised the same error {when} before"
    return ""
