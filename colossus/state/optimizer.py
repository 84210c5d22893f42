"""The optimizer in a checkpoint: its class, the options of its groups, and what it (or a strategy) keeps for each
parameter, as boxes of whole tensors by logical name."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from colossus.checkpoint.errors import CheckpointError
from colossus.checkpoint.reader import CheckpointReader
from colossus.checkpoint.tensor_box import TensorBox
from colossus.checkpoint.tensor_file import DTYPES
from colossus.checkpoint.values import encode
from colossus.state.parameters import ParameterBox
from colossus.state.whole_state import SUFFIX

log = logging.getLogger("colossus.engine")

#: stored parameter -> name -> tensor of its shape, another tensor that is the same on all ranks, or a plain value
ParameterState = Mapping[nn.Parameter, Mapping[str, Any]]
#: options of a parameter group, without the parameters
GroupOptions = dict[str, Any]
#: as `optimizer_values` gives them
SavedOptimizer = Mapping[str, Any]


def group_options(optimizer: torch.optim.Optimizer) -> list[GroupOptions]:
    """Of each parameter group: copies, which do not change with the optimizer."""
    return copy.deepcopy(
        [{key: group[key] for key in group if key not in ("params", "param_names")} for group in optimizer.param_groups]
    )


def why_not_saved(optimizer: Any) -> str | None:
    """Why a checkpoint could not hold what an optimizer keeps, in words: it keeps it where nobody else can see it, or
    where another plan would not know what is of which rank."""
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


def optimizer_values(optimizer: Any, made: Sequence[GroupOptions]) -> dict[str, Any]:
    """What is saved of an optimizer beside the state of its parameters; nothing of one that has nothing to update.

    Args:
        made: the options of its groups as it was made.
    """
    if problem := why_not_saved(optimizer):
        raise CheckpointError(problem)
    kind = kind_of(optimizer)
    return {} if _is_empty(optimizer) else {"kind": kind, "made": list(made), "now": group_options(optimizer)}


def kind_of(optimizer: Any) -> str:
    """The name of its class; of one that runs on whole parameters, ``SOAP, whole``."""
    inner = getattr(optimizer, "inner", None)
    return type(optimizer).__qualname__ if inner is None else f"{type(inner).__qualname__}, whole"


def _is_empty(optimizer: Any) -> bool:
    return not any(param.numel() for group in optimizer.param_groups for param in group["params"])


def saved_optimizer(values: Mapping[str, Any], replica: str = "") -> SavedOptimizer | None:
    """Of the first pipeline stage that has something to update; None where none was saved."""
    found = (values[path] for path in sorted(values) if path.startswith(f"{replica}optimizer_groups/"))
    return next(filter(None, found), None)


def require_same_optimizer(
    reader: CheckpointReader, saved: SavedOptimizer | None, optimizer: Any, section: str
) -> None:
    """That the optimizer is of the class which was saved, where it has kept anything.

    Args:
        section: in which its state is.
    """
    keeps = any(any(reader.manifest.names(each)) for each in (section, section + SUFFIX))
    if saved is None or not keeps or _is_empty(optimizer):
        return
    before = _in_words(saved["kind"], saved["made"])
    now = _in_words(kind_of(optimizer), optimizer.param_groups)
    if before != now:
        raise CheckpointError(
            f"{reader.folder} was saved with the optimizer {before}, this run has {now}: take {before}, or begin a run "
            f"with the weights alone (checkpoint.weights, or run.checkpoints.load_weights)"
        )


def _in_words(kind: str, groups: Sequence[Mapping[str, Any]]) -> str:
    """The class, and what updates the rows of tables with sparse gradients where that is none of its own."""
    rules = sorted({group["row_rule"] for group in groups if group.get("row_rule") is not None})
    return f"{kind} with optimizer.tables {' and '.join(rules)}" if rules else kind


def options_to_go_on(
    made: Sequence[GroupOptions], saved: SavedOptimizer | None, *, is_logged: bool
) -> list[GroupOptions]:
    """The options with which a run goes on: those of the config (another lr, another weight decay) where they are not
    what they were then, which one line tells; the others as the checkpoint has them, also what a hook has changed.

    Args:
        made: as the optimizer of this run was made.
        is_logged: whether this rank logs what differs.
    """
    if saved is None or len(made) != len(saved["made"]):
        if saved is not None and is_logged:
            log.warning(
                "the optimizer of the checkpoint has %d groups of parameters, this run has %d: their options are those "
                "of the config", len(saved["made"]), len(made),
            )  # fmt: skip
        return list(made)
    changed, out = [], []
    for now, before, then in zip(made, saved["made"], saved["now"], strict=True):
        differ = {key: value for key, value in now.items() if key in before and value != before[key]}
        changed += [f"{key} was {before[key]!r} and is {value!r}" for key, value in differ.items()]
        out.append({**now, **then, **differ})
    if changed and is_logged:
        log.warning("the optimizer is made otherwise than in the checkpoint: %s", ", ".join(changed))
    return out


def restore_optimizer(optimizer: torch.optim.Optimizer, state: ParameterState, options: Sequence[GroupOptions]) -> None:
    """Give an optimizer this state of its parameters, and its groups these options. In place, so that whoever shares
    them has them, too; and in the dtypes that were saved, where ``load_state_dict`` of torch would cast them."""
    optimizer.state.clear()
    for group, of_group in zip(optimizer.param_groups, options, strict=True):
        group.update(of_group)
        on_device = group.get("fused") or group.get("capturable")
        for param in group["params"]:
            for entry, value in state.get(param, {}).items():
                is_moved = isinstance(value, Tensor) and (entry != "step" or on_device)
                optimizer.state[param][entry] = value.to(param.device) if is_moved else value


# -- what is kept for each parameter -----------------------------------------------------------------------


def state_boxes(
    section: str, state: ParameterState, boxes: Iterable[ParameterBox], values: dict[str, Any]
) -> Iterator[TensorBox]:
    """The tensors of a state under ``<section>/<name of the parameter>/<name>``; its plain values go to ``values``."""
    for box in boxes:
        plain: dict[str, Any] = {}
        of_param, path = state.get(box.parameter, {}), f"{section}/{box.name}"
        for entry, value in of_param.items():
            key = f"{path}/{entry}"
            if not isinstance(entry, str) or "/" in entry:
                raise CheckpointError(
                    f"{path}: state is kept under {entry!r}; a checkpoint needs names without a slash"
                )
            if not isinstance(value, Tensor):
                plain[entry] = value
            elif value.shape in (box.parameter.shape, _by_row(box.parameter)):
                yield box.tensor_box(key, value)
            elif value.dim() and box.is_split:
                raise _unknown_part(key, value.shape, box)
            else:
                yield TensorBox.whole(key, value, writes=box.writes_scalars)
        if plain and box.writes_scalars:
            tensors: dict[str, Tensor] = {}
            values[path] = encode(plain, path, tensors)
            for key, tensor in tensors.items():
                if tensor.dim() and box.is_split:
                    raise _unknown_part(key, tensor.shape, box)
                yield TensorBox.whole(key, tensor)


def _unknown_part(key: str, shape: Sequence[int], box: ParameterBox) -> CheckpointError:
    return CheckpointError(
        f"{key} has shape {tuple(shape)}, its parameter {box.logical.shape}, of which a rank holds a part: what is of "
        f"that part is not known. State of a split parameter must have its shape, a number for each row ([rows, 1]), "
        f"or none; take a plan that keeps the parameter whole, or the weights alone (checkpoint.weights)"
    )


def read_state(
    section: str,
    reader: CheckpointReader,
    values: Mapping[str, Any],
    boxes: Sequence[ParameterBox],
    existing: Mapping[Any, Mapping[str, Any]] | None = None,
    *,
    keeps_dtypes: bool = False,
) -> dict[nn.Parameter, dict[str, Any]]:
    """The state of this rank's parameters, as `state_boxes` had it under whatever plan.

    What had the dtype of its parameter has it again, also where that is another now; what had a dtype of its own keeps
    it. Entries that the checkpoint does not have are as if the parameter had never been updated.

    Args:
        values: of the checkpoint, decoded.
        existing: what is kept now: memory that fits is filled, and no other is taken.
        keeps_dtypes: what had the dtype of its parameter keeps that, too.
    """
    entries: dict[str, list[str]] = {}  # of each parameter by name, what is saved of its state in tensors
    for name in reader.manifest.names(section):
        owner, _, entry = name.rpartition("/")
        entries.setdefault(owner, []).append(entry)
    state: dict[nn.Parameter, dict[str, Any]] = {}
    for box in boxes:
        of_param = state.setdefault(box.parameter, {})
        for entry in entries.get(box.name, ()):
            key = f"{section}/{box.name}/{entry}"
            saved = reader.manifest.tensors[key]
            is_by_row = saved.shape == box.shape_by_row != box.logical.shape and box.is_split
            if saved.shape != box.logical.shape and not is_by_row:
                if saved.shape and box.is_split:
                    raise _unknown_part(f"{reader.folder}: {key}", saved.shape, box)
                of_param[entry] = reader.tensor(key)
                continue
            if entry not in of_param:
                shape = _by_row(box.parameter) if is_by_row else box.parameter.shape
                is_as_parameter = saved.dtype == reader.manifest.tensors[f"model/{box.name}"].dtype
                dtype = box.parameter.dtype if is_as_parameter and not keeps_dtypes else DTYPES[saved.dtype]
                kept = (existing or {}).get(box.parameter, {}).get(entry)
                fits = isinstance(kept, Tensor) and (kept.shape, kept.dtype) == (shape, dtype)
                of_param[entry] = kept if fits else torch.zeros(shape, dtype=dtype, device=box.parameter.device)
            held = box.tensor_box(key, of_param[entry])
            reader.read_box(key, held.box, held.local)
        of_param.update(values.get(f"{section}/{box.name}", {}))
    return {param: of_param for param, of_param in state.items() if of_param}


def _by_row(parameter: Tensor) -> torch.Size:
    """The shape of a number for each row."""
    return torch.Size((*parameter.shape[:1], *(1 for _ in parameter.shape[1:])))
