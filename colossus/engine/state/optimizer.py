"""The state of an optimizer: of each parameter by logical name, and the options of its groups."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from colossus.engine.state.per_parameter import ParameterState

log = logging.getLogger("colossus.engine")

#: options of a parameter group, without the parameters
GroupOptions = dict[str, Any]


def group_options(optimizer: torch.optim.Optimizer) -> list[GroupOptions]:
    """Of each parameter group."""
    return [
        {key: value for key, value in group.items() if key not in ("params", "param_names")}
        for group in optimizer.param_groups
    ]


def restored_options(
    made: Sequence[GroupOptions], saved_made: Sequence[GroupOptions], saved: Sequence[GroupOptions]
) -> list[GroupOptions]:
    """The options with which a run goes on: those that were saved, but where the user has made the optimizer otherwise.

    Args:
        made: as the optimizer of this run was made.
        saved_made: as that of the saved run was made.
        saved: as they were then.
    """
    if len(made) != len(saved):
        log.warning(
            "the optimizer has %d parameter groups, the checkpoint's had %d: their options are those of this run",
            len(made), len(saved),
        )  # fmt: skip
        return [dict(options) for options in made]
    out = []
    for now, before, then in zip(made, saved_made, saved, strict=True):
        changed = {key for key in now if key in then and now[key] != before.get(key)}
        if changed:
            log.warning("options of the optimizer that differ from the checkpoint's: %s", ", ".join(sorted(changed)))
        out.append({key: value if key in changed or key not in then else then[key] for key, value in now.items()})
    return out


def restore(optimizer: torch.optim.Optimizer, state: ParameterState, options: Sequence[GroupOptions]) -> None:
    """Give an optimizer this state of its parameters, and its groups these options."""
    packed = optimizer.state_dict()
    params = [param for group in optimizer.param_groups for param in group["params"]]
    packed["param_groups"] = [
        {**group, **of_group} for group, of_group in zip(packed["param_groups"], options, strict=True)
    ]
    packed["state"] = {index: dict(state[param]) for index, param in enumerate(params) if param in state}
    optimizer.load_state_dict(packed)
    for param in params:  # torch casts to the dtype of the parameter; a state that was wider stays so
        for entry, value in state.get(param, {}).items():
            if isinstance(value, Tensor) and entry != "step":
                optimizer.state[param][entry] = value.to(param.device)
