"""The state of an optimizer: of each parameter by logical name, and the options of its groups."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from colossus.checkpoint.errors import CheckpointError
from colossus.checkpoint.reader import CheckpointReader
from colossus.checkpoint.values import decode
from colossus.comm.objects import all_gather_object
from colossus.context.groups import AxisGroup
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


def kind_of(optimizer: Any) -> str:
    """What the state of an optimizer means: the name of its class."""
    return type(optimizer).__qualname__


def is_empty(optimizer: Any) -> bool:
    """Whether it is the one of a rank that has nothing to update."""
    return not any(param.numel() for group in optimizer.param_groups for param in group["params"])


@dataclass(frozen=True)
class SavedGroups:
    """What a checkpoint says of an optimizer: its kind, the options of its groups as it was made, and then."""

    kind: str
    made: list[GroupOptions]
    now: list[GroupOptions]


def saved_groups(reader: CheckpointReader) -> SavedGroups | None:
    """Of the first pipeline stage that has something to update; None where none was saved."""
    found = [
        decode(value, reader.tensor)
        for path, value in sorted(reader.manifest.values.items())
        if path.startswith("optimizer_groups/")
    ]
    if not found:
        return None
    chosen = next((each for each in found if not each["is_empty"]), found[0])
    return SavedGroups(chosen["kind"], chosen["made"], chosen["now"])


def require_same_optimizer(
    reader: CheckpointReader, saved: SavedGroups | None, optimizer: Any, world: AxisGroup
) -> None:
    """That the optimizer is of the kind which was saved, where it has kept anything. Collective.

    Raises:
        CheckpointError: on all ranks.
    """
    kept = {name.rpartition("/")[2] for name in reader.manifest.names("optimizer")}
    mine = None if is_empty(optimizer) else (kind_of(optimizer), _needs_maxima(optimizer))
    here = next((each for each in all_gather_object(mine, world) if each is not None), None)
    if saved is None or here is None or not kept:
        return
    kind, needs_maxima = here
    if kind != saved.kind:
        raise CheckpointError(
            f"{reader.folder} was saved with the optimizer {saved.kind}, this run has {kind}: what the one has kept of "
            f"each parameter ({', '.join(sorted(kept))}) tells the other nothing. Take {saved.kind}, or begin a run "
            f"with the weights alone: checkpoint.weights, or engine.checkpoints.load_weights"
        )
    if needs_maxima and "exp_avg_sq" in kept and not kept & _MAXIMA:
        raise CheckpointError(
            f"{reader.folder} was saved by {saved.kind} without amsgrad, this run has amsgrad=True: the maxima that it "
            f"needs were not kept. Leave amsgrad out, or begin a run with the weights alone (checkpoint.weights)"
        )


#: entries in which torch's Adam and AdamW keep the maxima of amsgrad
_MAXIMA = {"max_exp_avg_sq"}


def _needs_maxima(optimizer: Any) -> bool:
    return any(group.get("amsgrad") is True for group in optimizer.param_groups)


def options_to_go_on(made: Sequence[GroupOptions], saved: SavedGroups | None, *, tells: bool) -> list[GroupOptions]:
    """The options with which a run goes on: those that were saved, but where the user has made the optimizer otherwise.

    So what a hook has changed on the way stays changed, and what the config says now (another lr, another weight
    decay) is done. Options that only one of them has, and all where the number of groups differs, are those of this
    run.

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
        changed = [key for key in now if key in then and not _same(now[key], before.get(key))]
        if changed and tells:
            told = ", ".join(f"{key} was {before.get(key)!r} and is {now[key]!r}" for key in sorted(changed))
            log.warning(
                "parameter group %d of the optimizer is made otherwise than in the checkpoint: %s", number, told
            )
        out.append({key: value if key in changed or key not in then else then[key] for key, value in now.items()})
    return out


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return bool(torch.equal(torch.as_tensor(one), torch.as_tensor(other)))
    return bool(one == other)


def restore(optimizer: torch.optim.Optimizer, state: ParameterState, options: Sequence[GroupOptions]) -> None:
    """Give an optimizer this state of its parameters, and its groups these options. Copies none of it."""
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
    for param in params:
        for entry, value in state.get(param, {}).items():
            if isinstance(value, Tensor) and _is_cast(param, entry, value):
                optimizer.state[param][entry] = value


def _is_cast(param: Tensor, entry: str, value: Tensor) -> bool:
    """Whether torch would cast this entry to the dtype of its parameter, although it was kept in another."""
    return entry != "step" and param.is_floating_point() and value.dtype != param.dtype


def _as_torch_keeps_it(param: Tensor, entry: str, value: Any) -> Any:
    return value.new_empty(0) if isinstance(value, Tensor) and _is_cast(param, entry, value) else value
