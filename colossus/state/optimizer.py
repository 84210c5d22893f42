"""The optimizer in a checkpoint.

A checkpoint stores its class, the options of its groups, and what it (or a strategy) keeps for each parameter. State
per parameter is stored as boxes of whole tensors by logical name.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from colossus.checkpoint.errors import CheckpointError
from colossus.checkpoint.part import Part, by_row
from colossus.checkpoint.reader import CheckpointReader
from colossus.checkpoint.tensor_file import DTYPES
from colossus.checkpoint.values import encode
from colossus.state.whole_state import SUFFIX

log = logging.getLogger("colossus.engine")

#: stored parameter -> name -> tensor of its shape, another tensor that is the same on all ranks, or a plain value
ParameterState = Mapping[nn.Parameter, Mapping[str, Any]]
#: options of a parameter group, without the parameters
GroupOptions = dict[str, Any]
#: result of `optimizer_values`
SavedOptimizer = Mapping[str, Any]


def group_options(optimizer: torch.optim.Optimizer) -> list[GroupOptions]:
    """Return copies of the options of each parameter group, which do not change with the optimizer."""
    return copy.deepcopy(
        [{key: group[key] for key in group if key not in ("params", "param_names")} for group in optimizer.param_groups]
    )


def why_not_saved(optimizer: Any) -> str | None:
    """Return why a checkpoint cannot hold the state of an optimizer, or None where it can.

    It cannot where the state is not in ``.state``, or belongs to no parameter: another plan would not know its rank.
    """
    kind = type(optimizer).__qualname__
    if not isinstance(getattr(optimizer, "state", None), Mapping):
        return f"{kind} has no .state, in which an optimizer of torch keeps what belongs to each parameter"
    for name, value in vars(optimizer).items() if not hasattr(optimizer, "tensor_state") else ():
        if isinstance(value, torch.optim.Optimizer) and value.state is not optimizer.state:
            return f"{kind} has another optimizer in .{name}: let both keep one state, self.state = self.{name}.state"
    if other := [key for key in optimizer.state if not isinstance(key, Tensor)]:
        return (
            f"{kind} keeps {other[0]!r} in its state, which is the state of no parameter: keep it in "
            f"self.state[parameter], or numbers in the options of a group"
        )
    return None


def optimizer_values(optimizer: Any, initial_options: Sequence[GroupOptions]) -> dict[str, Any]:
    """Return what is saved of an optimizer beside the state of its parameters; empty if it has nothing to update.

    Args:
        optimizer: an optimizer.
        initial_options: the options of its groups when it was made.
    """
    if problem := why_not_saved(optimizer):
        raise CheckpointError(problem)
    kind = kind_of(optimizer)
    return (
        {} if _is_empty(optimizer) else {"kind": kind, "made": list(initial_options), "now": group_options(optimizer)}
    )


def kind_of(optimizer: Any) -> str:
    """Return the name of the optimizer's class; ``SOAP, whole`` for one that runs on whole parameters."""
    inner = getattr(optimizer, "inner", None)
    return type(optimizer).__qualname__ if inner is None else f"{type(inner).__qualname__}, whole"


def _is_empty(optimizer: Any) -> bool:
    return not any(param.numel() for group in optimizer.param_groups for param in group["params"])


def saved_optimizer(values: Mapping[str, Any], replica: str = "") -> SavedOptimizer | None:
    """Return the optimizer of the first pipeline stage that has something to update; None where none was saved."""
    by_stage = (values[path] for path in sorted(values) if path.startswith(f"{replica}optimizer_groups/"))
    return next(filter(None, by_stage), None)


def require_same_optimizer(
    reader: CheckpointReader, saved: SavedOptimizer | None, optimizer: Any, section: str
) -> None:
    """Raise `CheckpointError` if the checkpoint has state of an optimizer of another class.

    Args:
        reader: reader of the checkpoint.
        saved: the optimizer in the checkpoint.
        optimizer: the optimizer of this run.
        section: section of the checkpoint that has its state.
    """
    has_state = any(any(reader.manifest.names(name)) for name in (section, section + SUFFIX))
    if saved is None or not has_state or _is_empty(optimizer):
        return
    before = _in_words(saved["kind"], saved["made"])
    now = _in_words(kind_of(optimizer), optimizer.param_groups)
    if before != now:
        raise CheckpointError(
            f"{reader.folder} was saved with the optimizer {before}, this run has {now}: take {before}, or begin a run "
            f"with the weights alone (checkpoint.weights, or engine.checkpoints.load_weights)"
        )


def _in_words(kind: str, groups: Sequence[Mapping[str, Any]]) -> str:
    """Return the name of the class, with the rules of ``optimizer.tables`` where there are some."""
    rules = sorted({group["row_rule"] for group in groups if group.get("row_rule") is not None})
    return f"{kind} with optimizer.tables {' and '.join(rules)}" if rules else kind


def options_to_go_on(
    initial_options: Sequence[GroupOptions], saved: SavedOptimizer | None, *, is_logged: bool
) -> list[GroupOptions]:
    """Return the options with which a resumed run continues.

    An option that the config has changed since (another lr, another weight decay) has its new value, and one warning
    lists the changes. Every other option has the value in the checkpoint, which a hook may have changed.

    Args:
        initial_options: the options of this run's optimizer when it was made.
        saved: the optimizer in the checkpoint.
        is_logged: whether this rank logs the changes.
    """
    if saved is None or len(initial_options) != len(saved["made"]):
        if saved is not None and is_logged:
            log.warning(
                "the optimizer of the checkpoint has %d groups of parameters, this run has %d: their options are those "
                "of the config", len(saved["made"]), len(initial_options),
            )  # fmt: skip
        return list(initial_options)
    changed, options = [], []
    for now, before, then in zip(initial_options, saved["made"], saved["now"], strict=True):
        differ = {key: value for key, value in now.items() if key in before and value != before[key]}
        changed += [f"{key} was {before[key]!r} and is {value!r}" for key, value in differ.items()]
        options.append({**now, **then, **differ})
    if changed and is_logged:
        log.warning("the options of the optimizer differ from the checkpoint: %s", ", ".join(changed))
    return options


def restore_optimizer(optimizer: torch.optim.Optimizer, state: ParameterState, options: Sequence[GroupOptions]) -> None:
    """Set the state of an optimizer's parameters and the options of its groups, in place.

    Others that share the state see the change. Tensors keep the dtypes that were saved; torch's ``load_state_dict``
    would cast them.
    """
    optimizer.state.clear()
    for group, options_of_group in zip(optimizer.param_groups, options, strict=True):
        group.update(options_of_group)
        on_device = group.get("fused") or group.get("capturable")
        for param in group["params"]:
            for entry, value in state.get(param, {}).items():
                is_moved = isinstance(value, Tensor) and (entry != "step" or on_device)
                optimizer.state[param][entry] = value.to(param.device) if is_moved else value


# -- what is kept for each parameter -----------------------------------------------------------------------


def state_parts(section: str, state: ParameterState, parts: Iterable[Part], values: dict[str, Any]) -> Iterator[Part]:
    """Yield the tensors of a state under ``<section>/<parameter>/<entry>``; add its plain values to ``values``.

    Args:
        section: section of the checkpoint.
        state: state by parameter.
        parts: the rank's parts of parameters.
        values: encoded values of the checkpoint, by path.
    """
    for part in parts:
        plain: dict[str, Any] = {}
        state_of_param, path = state.get(part.memory, {}), f"{section}/{part.key}"  # type: ignore[call-overload]
        for entry, value in state_of_param.items():
            key = f"{path}/{entry}"
            if not isinstance(entry, str) or "/" in entry:
                raise CheckpointError(
                    f"{path}: state is kept under {entry!r}; a checkpoint needs names without a slash"
                )
            if not isinstance(value, Tensor):
                plain[entry] = value
            elif value.shape in (part.memory.shape, by_row(part.memory.shape)):
                yield part.at(key, value)
            elif value.dim() and part.is_split:
                raise _unknown_part(key, value.shape, part)
            else:
                yield Part.whole(key, value, writes=part.writes_scalars)
        if plain and part.writes_scalars:
            tensors: dict[str, Tensor] = {}
            values[path] = encode(plain, path, tensors)
            for key, tensor in tensors.items():
                if tensor.dim() and part.is_split:
                    raise _unknown_part(key, tensor.shape, part)
                yield Part.whole(key, tensor)


def _unknown_part(key: str, shape: Sequence[int], part: Part) -> CheckpointError:
    return CheckpointError(
        f"{key} has shape {tuple(shape)}, its parameter {part.shape}, and each rank stores a part of the "
        f"parameter: it is not known which part of the state belongs to it. State of a split parameter must have its "
        f"shape, one number per row ([rows, 1]), or no dims; use a plan that keeps the parameter whole, or load the "
        f"weights alone (checkpoint.weights)"
    )


def read_state(
    section: str,
    reader: CheckpointReader,
    values: Mapping[str, Any],
    parts: Sequence[Part],
    existing: Mapping[Any, Mapping[str, Any]] | None = None,
    *,
    keeps_dtypes: bool = False,
) -> dict[nn.Parameter, dict[str, Any]]:
    """Return the state of this rank's parameters, saved by `state_parts` under any plan.

    An entry that had the dtype of its parameter gets the parameter's dtype of today; any other keeps its own. An entry
    that the checkpoint does not have is absent, as before the parameter's first update.

    Args:
        section: section of the checkpoint.
        reader: reader of the checkpoint.
        values: decoded values of the checkpoint.
        parts: the rank's parts of parameters.
        existing: state of the optimizer now; its tensors are filled where shape and dtype fit, to save memory.
        keeps_dtypes: whether entries with the dtype of their parameter keep the saved dtype, too.
    """
    entries: dict[str, list[str]] = {}  # name of a parameter -> its saved entries that are tensors
    for name in reader.manifest.names(section):
        owner, _, entry = name.rpartition("/")
        entries.setdefault(owner, []).append(entry)
    state: dict[Any, dict[str, Any]] = {}
    for part in parts:
        parameter = part.memory
        state_of_param = state.setdefault(parameter, {})
        for entry in entries.get(part.key, ()):
            key = f"{section}/{part.key}/{entry}"
            saved = reader.manifest.tensors[key]
            is_by_row = saved.shape == part.shape_by_row != part.shape and part.is_split
            if saved.shape != part.shape and not is_by_row:
                if saved.shape and part.is_split:
                    raise _unknown_part(f"{reader.folder}: {key}", saved.shape, part)
                state_of_param[entry] = reader.tensor(key)
                continue
            if entry not in state_of_param:
                shape = by_row(parameter.shape) if is_by_row else parameter.shape
                is_as_parameter = saved.dtype == reader.manifest.tensors[f"model/{part.key}"].dtype
                dtype = parameter.dtype if is_as_parameter and not keeps_dtypes else DTYPES[saved.dtype]
                current = (existing or {}).get(parameter, {}).get(entry)
                fits = isinstance(current, Tensor) and (current.shape, current.dtype) == (shape, dtype)
                state_of_param[entry] = current if fits else torch.zeros(shape, dtype=dtype, device=parameter.device)
            target = part.at(key, state_of_param[entry])
            reader.read_box(key, target.box, target.local)
        state_of_param.update(values.get(f"{section}/{part.key}", {}))
    return {param: state_of_param for param, state_of_param in state.items() if state_of_param}
