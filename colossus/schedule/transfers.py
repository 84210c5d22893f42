"""From the order in which ranks compute to full lists: sends, receives, reductions and the step. No torch.

Sends that block are safe when all ranks agree on one order of everything that happens, a transfer being one event for
its two ranks: whichever event is the next in that order, both its ranks have come to it. Playing the compute actions
gives each a time, a transfer gets the time at which its value is ready, and sorting by time is such an order.
"""

from __future__ import annotations

from typing import NamedTuple

from colossus.schedule.actions import COMPUTE, INPUT_GRADIENT, LAST_USE, Action, Actions, Kind, has_transfers, placement
from colossus.schedule.clock import Stuck, play
from colossus.schedule.errors import waits_for_ever
from colossus.schedule.order import check_order

#: any times above zero give a correct order; these give a good one
_TIMES = {"forward": 1.0, "backward": 2.0, "backward_input": 1.0, "backward_weight": 1.0}


class _Event(NamedTuple):
    """A place in the common order. Transfers come before the compute actions that start at the same time."""

    time: float
    local: bool
    #: boundaries between stages in two rounds, the even ones first, so that neighbouring transfers form no chain
    odd: bool
    boundary: int
    gradient: bool
    microbatch: int


def complete(actions: Actions) -> Actions:
    """The lists with what they lack: transfers if there are none at all, reductions, the step.

    Args:
        actions: for each rank its compute actions in order, or full lists, which stay as they are.

    Raises:
        ValueError: naming the first action that comes before what it needs, or waits for ever for another rank.
    """
    out = [_with_reductions(own) for own in actions]
    if not has_transfers(actions):
        microbatches = 1 + max((action.microbatch for own in actions for action in own), default=0)
        check_order(actions, microbatches, explicit=False)
        try:
            out = _with_transfers(out)
        except Stuck as stuck:
            # told by the lists as they were given: without the reductions put in
            heads = {rank: actions[rank].index(out[rank][index]) for rank, index in stuck.heads.items()}
            raise ValueError(waits_for_ever(actions, heads)) from None
    step = Action("step")
    return [own if step in own else [*own, step] for own in out]


def _with_reductions(own: list[Action]) -> list[Action]:
    """Each stage's gradients are reduced as soon as they are complete, beside what the rank still computes."""
    present = {action.stage for action in own if action.kind == "reduce"}
    last = {action.stage: index for index, action in enumerate(own) if action.kind in LAST_USE}
    out = []
    for index, action in enumerate(own):
        out.append(action)
        if last.get(action.stage) == index and action.stage not in present:
            out.append(Action("reduce", action.stage))
    return out


def _with_transfers(actions: Actions) -> Actions:
    rank_of = placement(actions)
    events: list[list[tuple[_Event, Action]]] = [[] for _ in actions]
    for rank, spans in enumerate(play(actions, lambda action: _TIMES.get(action.kind, 0.0))):
        for index, span in enumerate(spans):
            # sorting is stable, and the boundary of a local action is its place in the list
            events[rank].append((_Event(span.start, True, False, index, False, 0), span.action))
            send = _send_after(span.action, rank_of, rank)
            if send is None:
                continue
            assert send.peer is not None
            boundary = min(send.stage, send.peer)
            key = _Event(span.end, False, boundary % 2 == 1, boundary, send.kind == "send_gradient", send.microbatch)
            events[rank].append((key, send))
            events[rank_of[send.peer]].append((key, send.mirror()))
    return [[action for _, action in sorted(own, key=lambda event: event[0])] for own in events]


def _send_after(action: Action, rank_of: dict[int, int], rank: int) -> Action | None:
    """The send of what a compute action made, when another rank needs it."""
    if action.kind not in COMPUTE or action.kind == "backward_weight":
        return None
    peer = action.stage + (-1 if action.kind in INPUT_GRADIENT else 1)
    if rank_of.get(peer, rank) == rank:
        return None
    kind: Kind = "send_gradient" if action.kind in INPUT_GRADIENT else "send_activation"
    return Action(kind, action.stage, action.microbatch, peer)
