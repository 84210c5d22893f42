"""Optimizers: torch's by name, fused unless the config says otherwise, and a user's own, with its checks."""

from __future__ import annotations

import importlib
import inspect
import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from colossus.comm.objects import all_gather_object
from colossus.config import Config, ConfigError
from colossus.config.sections import Optimizer as OptimizerSection
from colossus.context.parallel_context import ParallelContext
from colossus.engine.optimizer_trial import UntriedError, trial_problem
from colossus.engine.parameter_groups import ParameterGroups
from colossus.layers.embedding import Embedding, PositionEmbedding
from colossus.layers.lm_head import LMHead
from colossus.layout.parameter import spec_of
from colossus.optim.logical_tensors import Holders
from colossus.optim.torch_classes import without_dynamo
from colossus.registry import OPTIMIZERS, TORCH_OPTIMIZERS
from colossus.sparse.table_optimizers import set_table_options, table_problem
from colossus.state.optimizer import why_not_saved

log = logging.getLogger("colossus.engine")

#: (full name, parameter) of the parameters that a rank updates, as in ``model.named_parameters()``
NamedParameters = list[tuple[str, nn.Parameter]]
OptimizerFactory = Callable[[NamedParameters], torch.optim.Optimizer]

#: stands for the optimizer of a rank that has nothing to update
_EMPTY: Any = object()
#: optimizers that are fused unless the options say otherwise
_FUSED = ("AdamW", "Adam", "SGD")


def torch_optimizer(name: str, params: Iterable[Any], **options: Any) -> Any:
    """Return an optimizer of torch that a config names: fused if possible, unless the options say otherwise.

    Args:
        name: name of the class.
        params: parameters, or groups of them.
        options: arguments of the class.
    """
    params, kind = list(params), OPTIMIZERS.get(name)
    flat = [param for entry in params for param in (entry["params"] if isinstance(entry, dict) else [entry])]
    if name in _FUSED and not options.get("foreach") and not any(param.is_complex() for param in flat):
        # torch's fused kernels support no complex numbers, and no dampening, whose first step differs
        options.setdefault("fused", name != "SGD" or not options.get("dampening"))
    optimizer = without_dynamo(kind)(params, **options)
    if name == "SGD":
        optimizer.register_step_pre_hook(_begin_momentum)
    return optimizer


def _begin_momentum(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Set the momentum of parameters with a first gradient to 0: SGD's fused kernel needs it for all or none."""
    for group in optimizer.param_groups:
        if group["momentum"] and group["fused"] and not group["dampening"]:
            for param in group["params"]:
                if param.grad is not None and optimizer.state[param].get("momentum_buffer") is None:
                    optimizer.state[param]["momentum_buffer"] = torch.zeros_like(param)


def require_factory(factory: Any, config: Config) -> None:
    """Raise ValueError unless ``optimizer=`` is a function, and the config has no section ``optimizer``."""
    if not callable(factory):
        raise ValueError(
            f"optimizer= is a {type(factory).__name__}; pass a function of the list of (name, parameter) pairs that "
            f"this rank updates, which returns a torch.optim.Optimizer: optimizer=lambda named: "
            f"torch.optim.AdamW(named, lr=1e-3)"
        )
    if "optimizer" in config.model_fields_set:
        raise ValueError(
            "the config has a section `optimizer`, and optimizer= was passed to colossus.initialize: remove one of "
            "them. The learning rate of your own optimizer is the one it is made with; lr_schedule multiplies it"
        )


def build_optimizer(
    config: Config,
    factory: OptimizerFactory | None,
    params: Sequence[nn.Parameter],
    holders: Holders,
    tables: Collection[int] = (),
    groups: ParameterGroups | None = None,
) -> tuple[torch.optim.Optimizer, Config]:
    """Return the optimizer of this rank, and the config with the schedule's first learning rate. Collective.

    ``factory`` is called with (name, parameter) pairs. Without one, the config's ``type`` is called with its options
    and ``params=``, the parameters, or with ``named_parameters=``, the pairs, if it has that argument. Ranks that train
    the same stage must make the same groups. A rank without parameters, or for which the function picks none, has an
    optimizer that updates nothing.

    Args:
        config: config of the run.
        factory: the user's function of (name, parameter) pairs, or None.
        params: parameters that this rank updates, as stored.
        holders: the ranks that store them (`holders_of`).
        tables: ids of parameters with sparse gradients.
        groups: groups of a config with rules, or of a model with tables.

    Raises:
        ValueError: on all ranks, if the user's function returns no optimizer of these parameters, or one that computes
            something else with the parts of parameters that ranks store (`trial_problem`).
    """
    context = holders.context
    if factory is None:
        require_options(config.optimizer)
    named = [(spec_of(param).name, param) for param in params]
    optimizer = make_optimizer(factory, config, named, holders, groups)
    problem, untried = None, ""
    if optimizer is not _EMPTY:
        try:
            problem = _problem(optimizer, dict(named), config, context, tables)
        except UntriedError as error:
            untried = str(error)
    #: learning rate of each group
    rates: list[float | None] = []
    if optimizer is not _EMPTY and problem is None:
        if factory is None:
            set_table_options(optimizer, config.optimizer)
        for group in optimizer.param_groups if groups is not None else ():
            group["lr"] *= group.pop("lr_scale", 1.0)
        rates = [float(group["lr"]) if "lr" in group else None for group in optimizer.param_groups]
        if tables:
            problem = table_problem(optimizer, {id(param): name for name, param in named if id(param) in tables})
    source = "optimizer.type" if factory is None else "optimizer="
    by_rank = all_gather_object((problem, rates, untried), context.group(context.grid.names))
    for rank, (problem_of_rank, *_) in enumerate(by_rank):
        if problem_of_rank is not None:
            raise ValueError(f"{source}: {problem_of_rank}" + (f" (rank {rank})" if context.world_size > 1 else ""))
    rates = next((rates_of_rank for _, rates_of_rank, _ in by_rank if rates_of_rank), [])
    if context.is_logging_rank and (warnings := [words for *_, words in by_rank if words]):
        log.warning("%s", warnings[0])
    if not rates:
        raise ValueError(f"{source}: the optimizer has no parameter on any rank, so nothing would be trained")
    if optimizer is _EMPTY:  # an optimizer of torch needs a parameter
        empty: list[dict[str, Any]] = [{"params": [], "lr": rate or 0.0} for rate in rates]
        empty[0]["params"] = [nn.Parameter(torch.zeros(0))]
        optimizer = torch.optim.SGD(empty, lr=0.0, fused=False, foreach=False)
    if factory is not None:
        peak = next((rate for rate in rates if rate), None)
        lr: dict[str, Any] = {} if peak is None else {"lr": peak}
        section = OptimizerSection(type=factory, **lr)
        config = config.model_copy(update={"optimizer": section})
    return optimizer, config


def holders_of(
    module: nn.Module, context: ParallelContext, summed_axes: Iterable[str], sparse: Collection[int] = ()
) -> Holders:
    """Return the ranks that store the parameters of a stage and have the same sums of their gradients.

    The parameters of embeddings, and of output layers by their class or name, are marked as tables: their rows stand
    for tokens or classes.

    Args:
        module: the rank's part of the model.
        context: the rank's context.
        summed_axes: axes over which gradients are summed.
        sparse: ids of the stored tables with sparse gradients.
    """
    rows = set()
    for name, part in module.named_modules():
        kinds = nn.Embedding, nn.EmbeddingBag, Embedding, PositionEmbedding, LMHead
        if isinstance(part, kinds) or name.rpartition(".")[2] in ("lm_head", "head", "classifier"):
            rows |= {id(param) for param in part.parameters()}
    return Holders(context, (axis for axis in summed_axes if axis != "pipeline"), rows, sparse)


def make_optimizer(
    factory: OptimizerFactory | None,
    config: Config,
    named: NamedParameters,
    holders: Holders,
    groups: ParameterGroups | None,
) -> Any:
    """Return the optimizer of the user's function, or the config's; ``_EMPTY`` if this rank updates nothing."""
    if not named:
        return _EMPTY
    section = config.optimizer
    try:
        if factory is not None:
            return factory(list(named))
        params: list[Any] = [param for _, param in named] if groups is None else groups.for_optimizer(named)
        kind, options = _class_of(section), section.arguments
        if section.whole:
            whole = importlib.import_module("colossus.optim.whole")  # imported only if it is used
            return whole.WholeParameters(params, holders, partial(kind, **options))
        if section.type in TORCH_OPTIMIZERS:
            return torch_optimizer(section.type, params, **options)
        if _takes(kind, "holders"):
            return kind(params, holders, **options)
        if _takes(kind, "named_parameters"):
            return kind(named_parameters=named, **options)
        return kind(params=params, **options)
    except ValueError as error:
        if "empty parameter list" in str(error):  # torch's error if the function picks no parameter of this stage
            return _EMPTY
        raise


def _class_of(section: OptimizerSection) -> Any:
    """Return the optimizer's class or function; torch's classes and ours without the wrappers that import _dynamo."""
    kind = section.type if callable(section.type) else OPTIMIZERS.get(section.type)
    is_ours = getattr(kind, "__module__", "").startswith(("torch.optim", "colossus.optim"))
    return without_dynamo(kind) if is_ours and isinstance(kind, type) else kind


def _takes(kind: Callable[..., Any], argument: str) -> bool:
    try:
        return argument in inspect.signature(kind).parameters
    except (TypeError, ValueError):
        return False


#: alternatives to an optimizer that computes with whole matrices
_WHOLE = (
    "Use an exact one by its name (LAMB, LARS, Adafactor, Muon), run this one on whole parameters, optimizer = "
    "dict(type=.., whole=True), or use one that works element by element (AdamW, SGD), or a plan that stores "
    "parameters whole"
)


def _problem(
    optimizer: Any, named: dict[str, nn.Parameter], config: Config, context: ParallelContext, tables: Collection[int]
) -> str | None:
    """Return what is wrong with an optimizer of these parameters, or None; see `trial_problem`."""
    kind, names = type(optimizer).__name__, {id(param): name for name, param in named.items()}
    if not isinstance(optimizer, torch.optim.Optimizer):
        return f"the function returned a {kind}; it must return a torch.optim.Optimizer over the parameters it gets"
    params = [param for group in optimizer.param_groups for param in group["params"]]
    if any(id(param) not in names for param in params):
        return (
            "it has parameters that it did not get. Make it of the parameters in the pairs that the function is called "
            "with: this rank stores and trains those; the model's own may be others"
        )
    if (words := _refusal(type(optimizer))) and not all(id(param) in tables for param in params):
        return f"{kind}: {words}"
    if config.checkpoint.every and (reason := why_not_saved(optimizer)):
        return f"{reason}; or set checkpoint.every = 0"
    sizes = context.grid.sizes
    in_parts = [
        param
        for param in params
        if id(param) not in tables and any(sizes[axis] > 1 for axis in spec_of(param).layout.shard_axes)
    ]
    if in_parts and (words := trial_problem(optimizer, in_parts)):
        return (
            f"{words}, and this rank stores a part of {names[id(in_parts[0])]}: the result would depend on the plan. "
            f"{_WHOLE}"
        )
    return None


def _refusal(kind: type) -> str | None:
    """Return why no run can use this class of torch, or None."""
    return next((why for name, why in OPTIMIZERS.refused.items() if issubclass(kind, getattr(torch.optim, name))), None)


def require_options(section: OptimizerSection) -> None:
    """Raise ConfigError unless the class of a config can be used, with groups and with whole parameters if they are."""
    kind = _class_of(section)
    name = getattr(kind, "__name__", str(kind))
    if (section.has_groups or section.tables is not None) and _takes(kind, "named_parameters"):
        raise ConfigError(
            f"optimizer.groups, layer_decay, tables: {name} takes named_parameters, of which it makes groups itself: "
            f"remove these keys, or let it take params"
        )
    if section.whole and _takes(kind, "holders"):
        raise ConfigError(
            f"optimizer.whole: {name} computes with whole parameters by itself, and sends less: remove optimizer.whole"
        )
    if isinstance(kind, type) and (words := _refusal(kind)):
        raise ConfigError(f"optimizer.type: {name}: {words}")
