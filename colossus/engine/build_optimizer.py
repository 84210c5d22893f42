"""The optimizer of a run, from its config or from the user's own function, checked against what it is to update."""

from __future__ import annotations

import inspect
import warnings
from collections import Counter
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from colossus.comm.objects import all_gather_object
from colossus.config import Config
from colossus.config.schema import Optimizer as OptimizerSection
from colossus.context.parallel_context import ParallelContext
from colossus.layout.parameter import spec_of
from colossus.registry import OPTIMIZERS
from colossus.sparse.row_update import table_problem
from colossus.sparse.table_group import group_tables, tell_of_weight_decay
from colossus.state.optimizer import why_not_saved

#: (full name, parameter) of what a rank updates, as ``model.named_parameters()`` would give it
NamedParameters = list[tuple[str, nn.Parameter]]
OptimizerFactory = Callable[[NamedParameters], torch.optim.Optimizer]

_NEEDED = ("param_groups", "step", "zero_grad", "state_dict", "load_state_dict")
#: names that a message lists
_MOST = 5


def require_factory(factory: Any, config: Config) -> None:
    """That ``optimizer=`` of `colossus.initialize` is a function, and the only word about the optimizer.

    Raises:
        ValueError: when it is an optimizer that exists already, or the config has an ``optimizer`` section, too.
    """
    if not callable(factory):
        raise ValueError(
            f"optimizer= is {_a(factory)}; pass a function of the list of (name, parameter) pairs that this rank "
            f"updates, which returns a torch.optim.Optimizer: optimizer=lambda named: torch.optim.AdamW(named, lr=1e-3)"
        )
    if "optimizer" in config.model_fields_set:
        raise ValueError(
            "the config has a section `optimizer`, and optimizer= was passed to colossus.initialize: leave one of them "
            "out. The learning rate of your own optimizer is the one it is made with; lr_schedule multiplies it"
        )


def build_optimizer(
    config: Config,
    factory: OptimizerFactory | None,
    params: Sequence[nn.Parameter],
    context: ParallelContext,
    tables: Container[int] | None = None,
) -> tuple[torch.optim.Optimizer, Config]:
    """The optimizer of this rank, and the config with the learning rate that the schedule starts from.

    ``factory`` is called with (name, parameter) pairs; without one, the config's ``type`` with its options and with
    ``params=``, the parameters, or where it takes ``named_parameters``, with the pairs under that name. Collective
    where either is the user's own. A rank without parameters, or whose parameters the factory leaves out, has an
    optimizer that updates nothing.

    Args:
        params: what this rank updates, as it is stored.
        tables: ids of those of them that have sparse gradients; None: no rank has one.

    Raises:
        ValueError: on all ranks, when what the user's function returns is no optimizer of these parameters.
    """
    named = [(spec_of(param).name, param) for param in params]
    if factory is None and config.optimizer.type in _OWN:
        made = _from_config(config, named) if named else _updates_nothing([config.optimizer.lr])
        _group_tables(made, config, context, tables)
        return made, config
    made = _make(factory, config, named)
    problem = None if made is _EMPTY else _problem(made, named)
    if factory is None and made is not _EMPTY and problem is None:
        _group_tables(made, config, context, tables)
    if made is not _EMPTY and problem is None and tables:
        problem = table_problem(made, {id(param): name for name, param in named if id(param) in tables})
    if made is not _EMPTY and problem is None and config.checkpoint.every and (reason := why_not_saved(made)):
        problem = f"{reason}; or set checkpoint.every = 0"
    told = all_gather_object(
        _Told(problem, _rates(made, problem), _sizes(made, problem)), context.group(context.grid.names)
    )
    source = "optimizer.type" if factory is None else "optimizer="
    for rank, each in enumerate(told):
        if each.problem is not None:
            raise ValueError(f"{source}: {each.problem}" + (f" (rank {rank})" if context.world_size > 1 else ""))
    _require_equal_replicas(source, told, context)
    rates = next((each.rates for each in told if each.rates), None)
    if rates is None:
        raise ValueError(f"{source}: the optimizer has no parameter on any rank, so nothing would be trained")
    optimizer = _updates_nothing(rates) if made is _EMPTY else made
    _warn_of_left_out(optimizer, named, context)
    peak = next((rate for rate in rates if rate), None)
    if factory is not None:
        lr: dict[str, Any] = {} if peak is None else {"lr": peak}
        section = OptimizerSection(type=factory, **lr)
        config = config.model_copy(update={"optimizer": section})
    return optimizer, config


#: the types that are colossus' own
_OWN = ("AdamW", "Adam", "Adagrad", "SGD")
#: in the place of the optimizer of a rank that has nothing to update
_EMPTY: Any = object()


def _group_tables(made: Any, config: Config, context: ParallelContext, tables: Container[int] | None) -> None:
    if tables is not None:
        group_tables(made, config, lambda param: id(param) in tables)
        if context.is_logging_rank:
            tell_of_weight_decay(config, made)


def _require_equal_replicas(source: str, told: Sequence[_Told], context: ParallelContext) -> None:
    """That ranks which hold the same stages update them alike."""
    first: dict[int, int] = {}
    for rank, each in enumerate(told):
        other = first.setdefault(context.grid.coordinates(rank)["pipeline"], rank)
        if told[other] != each:
            raise ValueError(
                f"{source}: the optimizers of ranks {other} and {rank}, which train the same stage, differ: groups of "
                f"{told[other].sizes} parameters with learning rates {told[other].rates}, and of {each.sizes} with "
                f"{each.rates}. Make them alike on all ranks"
            )


@dataclass(frozen=True)
class _Told:
    """What a rank tells the others: what is wrong, and the learning rate of each of its groups (none: no optimizer).

    Attributes:
        sizes: how many parameters each group has.
    """

    problem: str | None
    rates: list[float | None]
    sizes: list[int]


def _from_config(config: Config, named: NamedParameters) -> torch.optim.Optimizer:
    spec = config.optimizer.spec()
    kind = spec["type"] if callable(spec["type"]) else OPTIMIZERS.get(spec["type"])
    if _takes_names(kind):
        return OPTIMIZERS.build(spec, named_parameters=named)
    return OPTIMIZERS.build(spec, params=[param for _, param in named])


def _takes_names(kind: Callable[..., Any]) -> bool:
    try:
        return "named_parameters" in inspect.signature(kind).parameters
    except (TypeError, ValueError):
        return False


def _make(factory: OptimizerFactory | None, config: Config, named: NamedParameters) -> Any:
    """What the user's function returns; ``_EMPTY`` on a rank where it has nothing to update."""
    if not named:
        return _EMPTY
    try:
        return _from_config(config, named) if factory is None else factory(list(named))
    except ValueError as error:
        if "empty parameter list" in str(error):  # torch's, where the function picks none of this stage
            return _EMPTY
        error.add_note(
            "raised by the function that makes the optimizer, which was given each parameter of this rank once. A "
            "group may be empty on a stage of a pipeline, and torch takes no empty one beside groups of (name, "
            "parameter) pairs: put parameters alone into groups"
        )
        raise


def _problem(made: Any, named: NamedParameters) -> str | None:
    """What is wrong with an optimizer of these parameters, in words."""
    if not isinstance(made, torch.optim.Optimizer) and not all(hasattr(made, name) for name in _NEEDED):
        return f"the function returned {_a(made)}; it must return a torch.optim.Optimizer over what it is given"
    if _needs_closure(made):
        return (
            f"{type(made).__name__}.step needs a closure that computes the loss again, but the engine has computed the "
            f"gradients of a step by then: take an optimizer whose step takes nothing"
        )
    names = {id(param): name for name, param in named}
    held = [param for group in made.param_groups for param in group["params"]]
    strangers = [param for param in held if id(param) not in names]
    if strangers:
        shown = _listed([_stranger(param) for param in strangers])
        return (
            f"it holds {len(strangers)} parameter(s) that were not given to it: {shown}. Make it of the parameters in "
            f"the pairs that the function is called with: they are what this rank stores and trains, those of the "
            f"model need not be"
        )
    twice = [names[key] for key, count in Counter(map(id, held)).items() if count > 1]
    if twice:
        return f"it holds {_listed(twice)} more than once; each parameter belongs to one group"
    for index, group in enumerate(made.param_groups):
        if "lr" in group and not _is_number(group["lr"]):
            return (
                f"its parameter group {index} has lr = {group['lr']!r}; make it with a number, which lr_schedule "
                f"multiplies"
            )
    return _whole_matrix_problem(made, names)


def _whole_matrix_problem(made: Any, names: dict[int, str]) -> str | None:
    """Of torch's optimizers that compute with a whole matrix (a norm of it, its factors), given a shard of one."""
    if not isinstance(made, (torch.optim.Adafactor, torch.optim.Muon)):
        return None
    params = (param for group in made.param_groups for param in group["params"])
    split = [names[id(param)] for param in params if spec_of(param).layout.shard_axes]
    if not split:
        return None
    return (
        f"{type(made).__name__} computes with whole matrices, but this rank holds a shard of {_listed(split)}: the "
        f"update would depend on the plan. Take one that works element by element (AdamW, SGD), or give this one the "
        f"parameters that are whole"
    )


def _needs_closure(made: Any) -> bool:
    try:
        first = next(iter(inspect.signature(made.step).parameters.values()), None)
    except (TypeError, ValueError):
        return False
    named = first is not None and first.kind in (first.POSITIONAL_ONLY, first.POSITIONAL_OR_KEYWORD)
    return named and first is not None and first.default is first.empty


def _stranger(param: torch.Tensor) -> str:
    spec = getattr(param, "_colossus_spec", None)
    name = spec.name if spec is not None and spec.name else f"one of shape {tuple(param.shape)}"
    return name if param.requires_grad else f"{name} (frozen)"


def _is_number(rate: Any) -> bool:
    return isinstance(rate, int | float) or (isinstance(rate, torch.Tensor) and rate.numel() == 1)


def _rates(made: Any, problem: str | None) -> list[float | None]:
    if made is _EMPTY or problem is not None:
        return []
    return [float(group["lr"]) if "lr" in group else None for group in made.param_groups]


def _sizes(made: Any, problem: str | None) -> list[int]:
    return [] if made is _EMPTY or problem is not None else [len(group["params"]) for group in made.param_groups]


def _warn_of_left_out(optimizer: torch.optim.Optimizer, named: NamedParameters, context: ParallelContext) -> None:
    """Once for each stage, by the first of its ranks."""
    held = {id(param) for group in optimizer.param_groups for param in group["params"]}
    left_out = [name for name, param in named if id(param) not in held]
    if left_out and all(context.index(axis) == 0 for axis in context.grid.names if axis != "pipeline"):
        warnings.warn(
            f"the optimizer leaves out {len(left_out)} of {len(named)} trainable parameters ({_listed(left_out)}): "
            f"they keep their values, but their gradients are computed, summed over ranks and counted in the gradient "
            f"norm. To save that, call requires_grad_(False) on them while the model is built",
            stacklevel=2,
        )


def _updates_nothing(rates: Sequence[float | None]) -> torch.optim.Optimizer:
    """With as many groups as the optimizers of other stages; torch's insist on a parameter."""
    groups: list[dict[str, Any]] = [{"params": [], "lr": rate or 0.0} for rate in rates]
    groups[0]["params"] = [nn.Parameter(torch.zeros(0))]
    return torch.optim.SGD(groups, lr=0.0, fused=False, foreach=False)


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MOST} more" if len(names) > _MOST else ""
    return ", ".join(names[:_MOST]) + more


def _a(value: Any) -> str:
    return "None" if value is None else f"a {type(value).__name__}"
