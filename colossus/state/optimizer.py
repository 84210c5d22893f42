"""The optimizer in a checkpoint: its class, the options of its groups, what it keeps for no parameter.

What it keeps for each parameter is in `per_parameter`.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from colossus.checkpoint.errors import CheckpointError
from colossus.checkpoint.reader import CheckpointReader
from colossus.nest import map_leaves, tensors
from colossus.state.per_parameter import ParameterState

log = logging.getLogger("colossus.engine")

#: options of a parameter group, without the parameters
GroupOptions = dict[str, Any]
#: as `optimizer_values` gives them
SavedOptimizer = Mapping[str, Any]


def group_options(optimizer: torch.optim.Optimizer) -> list[GroupOptions]:
    """Of each parameter group: copies, which do not change with the optimizer."""
    groups = [
        {key: group[key] for key in group if key not in ("params", "param_names")} for group in optimizer.param_groups
    ]
    try:
        return copy.deepcopy(groups)
    except Exception:  # what cannot be copied cannot be saved either, and is refused there
        return groups


def why_not_saved(optimizer: Any) -> str | None:
    """Why a checkpoint could not hold what an optimizer keeps, in words: it keeps it where nobody else can see it."""
    kind = type(optimizer).__qualname__
    if not isinstance(getattr(optimizer, "state", None), Mapping):
        return f"{kind} has no .state, in which an optimizer of torch keeps what belongs to each parameter"
    for name, value in vars(optimizer).items():
        if isinstance(value, torch.optim.Optimizer) and value.state is not optimizer.state:
            return (
                f"{kind} has another optimizer in .{name}, which keeps state of its own: no checkpoint would have it. "
                f"Let both keep one state: self.state = self.{name}.state, in __init__"
            )
    return None


def optimizer_values(optimizer: Any, made: Sequence[GroupOptions]) -> dict[str, Any]:
    """What is saved of an optimizer beside the state of its parameters.

    Args:
        made: the options of its groups as it was made.

    Raises:
        CheckpointError: for state that a checkpoint cannot hold.
    """
    if problem := why_not_saved(optimizer):
        raise CheckpointError(problem)
    own = {key: value for key, value in optimizer.state.items() if not isinstance(key, Tensor)}
    for path, tensor in tensors(own):
        if tensor.dim():
            raise CheckpointError(
                f"{type(optimizer).__qualname__} keeps a tensor of shape {tuple(tensor.shape)} in its state{path}, "
                f"which is the state of no parameter: what another plan would have of it is not known. Keep it in "
                f"self.state[parameter]"
            )
    return {
        "kind": type(optimizer).__qualname__,
        "made": list(made),
        "now": group_options(optimizer),
        "own": own,
        "is_empty": _is_empty(optimizer),
    }


def _is_empty(optimizer: Any) -> bool:
    """Whether it is the one of a rank that has nothing to update."""
    return not any(param.numel() for group in optimizer.param_groups for param in group["params"])


def saved_optimizer(values: Mapping[str, Any], replica: str = "") -> SavedOptimizer | None:
    """Of the first pipeline stage that has something to update; None where none was saved.

    Args:
        values: of the checkpoint, decoded.
        replica: before the paths of one that has an optimizer of its own.
    """
    found = [values[path] for path in sorted(values) if path.startswith(f"{replica}optimizer_groups/")]
    if not found:
        return saved_optimizer(values) if replica else None
    return next((each for each in found if not each["is_empty"]), found[0])


def require_same_optimizer(
    reader: CheckpointReader, saved: SavedOptimizer | None, optimizer: Any, section: str
) -> None:
    """That the optimizer is of the class which was saved, where it has kept anything.

    Args:
        section: in which its state is.

    Raises:
        CheckpointError: it is not.
    """
    kept = {name.rpartition("/")[2] for name in reader.manifest.names(section)}
    if saved is None or not kept or _is_empty(optimizer):
        return
    before = _in_words(saved["kind"], saved["made"])
    now = _in_words(type(optimizer).__qualname__, optimizer.param_groups)
    if before != now:
        raise CheckpointError(
            f"{reader.folder} was saved with the optimizer {before}, this run has {now}: what the one has kept of each "
            f"parameter ({', '.join(sorted(kept))}) tells the other nothing. Take {before}, or begin a run with the "
            f"weights alone: checkpoint.weights, or run.checkpoints.load_weights"
        )


def _in_words(kind: str, groups: Sequence[Mapping[str, Any]]) -> str:
    """The class, and what updates the rows of tables with sparse gradients where that is none of its own."""
    rules = sorted({group["row_rule"] for group in groups if group.get("row_rule") is not None})
    return f"{kind} with optimizer.tables {' and '.join(rules)}" if rules else kind


def options_to_go_on(
    made: Sequence[GroupOptions], saved: SavedOptimizer | None, *, is_logged: bool
) -> list[GroupOptions]:
    """The options with which a run goes on: those of the checkpoint, but where the user has made the optimizer
    otherwise than then. So what a hook has changed on the way stays changed, and what the config says now (another lr,
    another weight decay) is done.

    Args:
        made: as the optimizer of this run was made.
        is_logged: whether this rank logs what differs.
    """
    if saved is None:
        return [dict(options) for options in made]
    changed, out = [], []
    if len(made) != len(saved["made"]):
        changed.append(f"{len(made)} parameter groups, where there were {len(saved['made'])}")
        out = [dict(options) for options in made]
    else:
        for number, (now, before, then) in enumerate(zip(made, saved["made"], saved["now"], strict=True)):
            differ = [key for key in now if key in before and not _same(now[key], before[key])]
            changed += [f"{key} of group {number} was {before[key]!r} and is {now[key]!r}" for key in sorted(differ)]
            late = {key: value for key, value in then.items() if key not in before}
            out.append(late | {key: value if key in differ else then.get(key, value) for key, value in now.items()})
    if changed and is_logged:
        log.warning("the optimizer is made otherwise than in the checkpoint: %s", ", ".join(changed))
    return out


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return bool(torch.equal(torch.as_tensor(one), torch.as_tensor(other)))
    return bool(one == other)


def restore_optimizer(
    optimizer: torch.optim.Optimizer,
    state: ParameterState,
    options: Sequence[GroupOptions],
    saved: SavedOptimizer | None,
) -> None:
    """Give an optimizer this state of its parameters, and its groups these options. In place, so that whoever shares
    them has them, too; and in the dtypes that were saved, where ``load_state_dict`` of torch would cast them."""
    optimizer.state.clear()
    for group, of_group in zip(optimizer.param_groups, options, strict=True):
        group.update(of_group)
        on_device = group.get("fused") or group.get("capturable")
        for param in group["params"]:
            for entry, value in state.get(param, {}).items():
                is_on_host = entry == "step" and not on_device
                optimizer.state[param][entry] = value if is_on_host else _on_device(value, param.device)
    optimizer.state.update(saved["own"] if saved is not None else {})


def _on_device(value: Any, device: torch.device) -> Any:
    return map_leaves(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, value)
