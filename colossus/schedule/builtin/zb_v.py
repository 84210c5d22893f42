"""ZB-V (zero bubble, 2401.10241 section 6; V-shaped placement as in 2405.15362): two stages per rank.

Backwards are split. Stages go down the ranks and back up: rank r has the stages r and 2 p - 1 - r of p ranks, so the
last rank passes its first stage's output to its second without a transfer, and the first rank has the loss. When
forward, dgrad and wgrad take the same time, ranks idle only until the first microbatch reaches them, and as long at the
end: the bubble is (p - 1) / (6 m + p - 1) from 2 p - 1 microbatches on. No rank holds more than 2 p activations of half
a rank's layers, as much as the first rank of 1F1B does.
"""

from __future__ import annotations

from collections import Counter

from colossus.registry import SCHEDULES
from colossus.schedule.actions import Action, Actions, Kind
from colossus.schedule.build import bounded
from colossus.schedule.builtin.one_f_one_b import one_f_one_b

_KINDS: dict[str, Kind] = {"F": "forward", "B": "backward_input", "W": "backward_weight"}


@SCHEDULES.register("zb-v")
@bounded(lambda stages, microbatches: [min(2 * stages, 2 * microbatches) if stages > 1 else 1] * stages)
def zb_v(stages: int, microbatches: int) -> Actions:
    """Rank r has the stages r and 2 ``stages`` - 1 - r."""
    if stages == 1:
        return one_f_one_b(stages, microbatches)
    out: Actions = []
    for rank in range(stages):
        chunks = {"d": rank, "u": 2 * stages - 1 - rank}
        next_microbatch: Counter[str] = Counter()
        actions = []
        for letters in _order(stages, rank, max(microbatches, 2 * stages - 1)):
            actions.append(Action(_KINDS[letters[0]], chunks[letters[1]], next_microbatch[letters]))
            next_microbatch[letters] += 1
        out.append([action for action in actions if action.microbatch < microbatches])
    return out


def _order(stages: int, rank: int, microbatches: int) -> list[str]:
    """What a rank does in turn: F, B (dgrad) or W (wgrad), of its stage on the way down (d) or up (u).

    Args:
        microbatches: at least 2 ``stages`` - 1; a caller with fewer leaves out those it does not have.
    """
    behind = stages - rank
    down, up = ["Fd", "Bd", "Wd"], ["Fu", "Bu", "Wu"]
    return [
        *["Fd"] * (2 * behind - 1),  # until the first microbatch is back up
        *["Fu", "Fd"] * rank,  # until its gradient is there
        *up * behind,  # until its gradient has come up to the last stage down
        *(down + up) * (microbatches - 2 * stages + rank + 1),
        *["Bd", "Wd", *up] * (behind - 1),  # no new microbatch is left
        *["Bd", "Bu"] * rank,
        *["Bd", "Wd"] * behind,
        *["Wu"] * rank,
        *["Wd"] * rank,
    ]
