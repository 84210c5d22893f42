"""The state of an optimizer: of each parameter by logical name, the options of its groups, numbers of its own."""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from colossus.checkpoint.errors import CheckpointError
from colossus.checkpoint.reader import CheckpointReader
from colossus.checkpoint.values import decode, encode
from colossus.comm.objects import all_gather_object
from colossus.context.groups import AxisGroup
from colossus.state.per_parameter import ParameterState

log = logging.getLogger("colossus.engine")

#: options of a parameter group, without the parameters
GroupOptions = dict[str, Any]


def group_options(optimizer: torch.optim.Optimizer) -> list[GroupOptions]:
    """Of each parameter group: copies, which do not change with the optimizer."""
    return [
        {key: _copied(value) for key, value in group.items() if key not in ("params", "param_names")}
        for group in optimizer.param_groups
    ]


def _copied(value: Any) -> Any:
    try:
        return copy.deepcopy(value)
    except Exception:  # what cannot be copied cannot be saved either, and is refused there
        return value


def kind_of(optimizer: Any) -> str:
    """What the state of an optimizer means: the name of its class."""
    return type(optimizer).__qualname__


def is_empty(optimizer: Any) -> bool:
    """Whether it is the one of a rank that has nothing to update."""
    return not any(param.numel() for group in optimizer.param_groups for param in group["params"])


def why_not_saved(optimizer: Any) -> str | None:
    """Why a checkpoint could not hold what an optimizer keeps, in words: it keeps it where nobody else can see it."""
    kind = kind_of(optimizer)
    if not isinstance(getattr(optimizer, "state", None), Mapping):
        return f"{kind} has no .state, in which an optimizer of torch keeps what belongs to each parameter"
    inner = [
        name
        for name, value in getattr(optimizer, "__dict__", {}).items()
        if isinstance(value, torch.optim.Optimizer) and value.state is not optimizer.state
    ]
    if inner:
        return (
            f"{kind} has another optimizer in .{inner[0]}, which keeps state of its own: no checkpoint would have it. "
            f"Let both keep one state (self.state = self.{inner[0]}.state, in __init__ and load_state_dict)"
        )
    own = inspect.unwrap(type(optimizer).state_dict)
    if own is not inspect.unwrap(torch.optim.Optimizer.state_dict) and (
        set(packed := optimizer.state_dict()) != {"state", "param_groups"}
        or len(packed["state"]) != len(optimizer.state)
    ):
        return (
            f"{kind} has a state_dict of its own, which gives another state than its .state and .param_groups: what "
            f"that is of which parameter is not known. Keep what belongs to a parameter in self.state[parameter], and "
            f"leave state_dict to torch.optim.Optimizer"
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
    return {
        "kind": kind_of(optimizer),
        "made": list(made),
        "now": group_options(optimizer),
        "own": _own_state(optimizer),
        "is_empty": is_empty(optimizer),
    }


def _own_state(optimizer: Any) -> dict[Any, Any]:
    """What it keeps in its ``state`` for no parameter: numbers, the same on all ranks."""
    own = {key: value for key, value in optimizer.state.items() if not isinstance(key, Tensor)}
    tensors: dict[str, Tensor] = {}
    for key, value in own.items():
        encode(value, f"state[{key!r}]", tensors)
    for path, tensor in tensors.items():
        if tensor.dim():
            raise CheckpointError(
                f"{kind_of(optimizer)} keeps a tensor of shape {tuple(tensor.shape)} in its {path}, which is the state "
                f"of no parameter: what another plan would have of it is not known. Keep it in self.state[parameter]"
            )
    return own


@dataclass(frozen=True)
class SavedGroups:
    """What a checkpoint says of an optimizer: its kind, the options of its groups as it was made, and then.

    Attributes:
        own: of its state, what belongs to no parameter.
    """

    kind: str
    made: list[GroupOptions]
    now: list[GroupOptions]
    own: Mapping[Any, Any] = field(default_factory=dict)


def saved_groups(reader: CheckpointReader, replica: str = "") -> SavedGroups | None:
    """Of the first pipeline stage that has something to update; None where none was saved.

    Args:
        replica: before the paths of one that has an optimizer of its own.
    """
    found = [
        decode(value, reader.tensor)
        for path, value in sorted(reader.manifest.values.items())
        if path.startswith(f"{replica}optimizer_groups/")
    ]
    if not found and replica:
        return saved_groups(reader)
    if not found:
        return None
    chosen = next((each for each in found if not each["is_empty"]), found[0])
    return SavedGroups(chosen["kind"], chosen["made"], chosen["now"], chosen.get("own", {}))


def require_same_optimizer(
    reader: CheckpointReader, saved: SavedGroups | None, optimizer: Any, world: AxisGroup, replica: str = ""
) -> None:
    """That the optimizer is of the kind which was saved, where it has kept anything. Collective.

    Args:
        replica: before the keys of one that has an optimizer of its own.

    Raises:
        CheckpointError: on all ranks.
    """
    kept = {name.rpartition("/")[2] for name in reader.manifest.names(f"{replica}optimizer")}
    mine = (
        None
        if is_empty(optimizer)
        else (kind_of(optimizer), _needs_maxima(optimizer), _row_rules(optimizer.param_groups))
    )
    here = next((each for each in all_gather_object(mine, world) if each is not None), None)
    if saved is None or here is None or not kept:
        return
    kind, needs_maxima, rules = here
    if kind != saved.kind:
        raise CheckpointError(
            f"{reader.folder} was saved with the optimizer {saved.kind}, this run has {kind}: what the one has kept of "
            f"each parameter ({', '.join(sorted(kept))}) tells the other nothing. Take {saved.kind}, or begin a run "
            f"with the weights alone: checkpoint.weights, or run.checkpoints.load_weights"
        )
    before = _row_rules(saved.made)
    if rules != before:
        raise CheckpointError(
            f"{reader.folder} was saved with the rule {' and '.join(before) or 'of ' + kind} of tables with sparse "
            f"gradients, this run has {' and '.join(rules) or 'that of ' + kind}: what the one has kept tells the "
            f"other nothing. Take the same optimizer.tables, or begin a run with the weights alone (checkpoint.weights)"
        )
    if needs_maxima and "exp_avg_sq" in kept and not kept & _MAXIMA:
        raise CheckpointError(
            f"{reader.folder} was saved by {saved.kind} without amsgrad, this run has amsgrad=True: the maxima that it "
            f"needs were not kept. Leave amsgrad out, or begin a run with the weights alone (checkpoint.weights)"
        )


def _row_rules(groups: Any) -> list[str]:
    """The rules of tables that groups name, other than the form for rows of their optimizer."""
    return sorted({group["row_rule"] for group in groups if group.get("row_rule") is not None})


#: entries in which torch's Adam and AdamW keep the maxima of amsgrad
_MAXIMA = {"max_exp_avg_sq"}


def _needs_maxima(optimizer: Any) -> bool:
    return any(group.get("amsgrad") is True for group in optimizer.param_groups)


def options_to_go_on(made: Sequence[GroupOptions], saved: SavedGroups | None, *, tells: bool) -> list[GroupOptions]:
    """The options with which a run goes on: those that were saved, but where the user has made the optimizer otherwise.

    So what a hook has changed on the way stays changed, and what the config says now (another lr, another weight
    decay) is done. What a step or a scheduler has put into a group (a count, ``initial_lr``) goes on, too. Options that
    only one of them was made with, and all where the number of groups differs, are those of this run.

    Args:
        made: as the optimizer of this run was made.
        saved: of the run that was saved.
        tells: whether this rank logs what differs.
    """
    if saved is None:
        return [dict(options) for options in made]
    if len(made) != len(saved.made):
        if tells:
            log.warning(
                "the optimizer has %d parameter groups, the checkpoint's had %d: their options are those of this run",
                len(made), len(saved.made),
            )  # fmt: skip
        return [dict(options) for options in made]
    out = []
    for number, (now, before, then) in enumerate(zip(made, saved.made, saved.now, strict=True)):
        changed = [key for key in now if key in then and key in before and not _same(now[key], before[key])]
        if changed and tells:
            told = ", ".join(f"{key} was {before.get(key)!r} and is {now[key]!r}" for key in sorted(changed))
            log.warning(
                "parameter group %d of the optimizer is made otherwise than in the checkpoint: %s", number, told
            )
        late = {key: value for key, value in then.items() if key not in before}
        kept = {key: value if key in changed or key not in then else then[key] for key, value in now.items()}
        out.append({**late, **kept})
    return out


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return bool(torch.equal(torch.as_tensor(one), torch.as_tensor(other)))
    return bool(one == other)


def restore(
    optimizer: torch.optim.Optimizer,
    state: ParameterState,
    options: Sequence[GroupOptions],
    own: Mapping[Any, Any] | None = None,
) -> None:
    """Give an optimizer this state of its parameters, and its groups these options. Copies none of it.

    Args:
        own: of its state, what belongs to no parameter.
    """
    packed = optimizer.state_dict()
    params = [param for group in optimizer.param_groups for param in group["params"]]
    packed["param_groups"] = [
        {**group, **of_group} for group, of_group in zip(packed["param_groups"], options, strict=True)
    ]
    packed["state"] = {
        index: {entry: _as_torch_keeps_it(param, entry, value) for entry, value in state[param].items()}
        for index, param in enumerate(params)
        if param in state
    }
    optimizer.load_state_dict(packed)
    problem = why_not_saved(optimizer)
    if problem or any(
        state[param].keys() - optimizer.state.get(param, {}).keys() for param in params if param in state
    ):
        raise CheckpointError(
            problem or f"{kind_of(optimizer)}.load_state_dict has not put what it was given into its .state"
        )
    for param in params:
        for entry, value in state.get(param, {}).items():
            if isinstance(value, Tensor) and _is_cast(param, entry, value):
                optimizer.state[param][entry] = value
    optimizer.state.update(own or {})


def _is_cast(param: Tensor, entry: str, value: Tensor) -> bool:
    """Whether torch would cast this entry to the dtype of its parameter, although it was kept in another."""
    return entry != "step" and param.is_floating_point() and value.dtype != param.dtype


def _as_torch_keeps_it(param: Tensor, entry: str, value: Any) -> Any:
    return value.new_empty(0) if isinstance(value, Tensor) and _is_cast(param, entry, value) else value
