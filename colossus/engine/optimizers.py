"""Optimizers: torch's by name, fused unless the config says otherwise; a user's own, and what is checked of it."""

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
from colossus.config.errors import brief
from colossus.config.optimizer_section import GROUP_OPTIONS
from colossus.config.optimizer_section import Optimizer as OptimizerSection
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

#: (full name, parameter) of what a rank updates, as ``model.named_parameters()`` would give it
NamedParameters = list[tuple[str, nn.Parameter]]
OptimizerFactory = Callable[[NamedParameters], torch.optim.Optimizer]

#: in the place of the optimizer of a rank that has nothing to update
_EMPTY: Any = object()
#: those that are fused unless the options say otherwise
_FUSED = ("AdamW", "Adam", "SGD")


def torch_optimizer(name: str, params: Iterable[Any], **options: Any) -> Any:
    """One of torch's that a config names: fused where it can be, unless the options say otherwise.

    Args:
        params: parameters, or groups of them.
    """
    params, kind = list(params), OPTIMIZERS.get(name)
    held = [param for each in params for param in (each["params"] if isinstance(each, dict) else [each])]
    if name in _FUSED and not options.get("foreach") and not any(param.is_complex() for param in held):
        # torch's fused kernels know no complex numbers, and no momentum whose first step is another one
        options.setdefault("fused", name != "SGD" or not options.get("dampening"))
    optimizer = without_dynamo(kind)(params, **options)
    if name == "SGD":
        optimizer.register_step_pre_hook(_begin_momentum)
    return optimizer


def _begin_momentum(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Give parameters whose first gradient has come momentum of zeros: SGD's fused kernel takes that of all or of none.
    What it then is, without dampening, is the gradient, as in torch's other ones.
    """
    for group in optimizer.param_groups:
        if group["momentum"] and group["fused"] and not group["dampening"]:
            for param in group["params"]:
                if param.grad is not None and optimizer.state[param].get("momentum_buffer") is None:
                    optimizer.state[param]["momentum_buffer"] = torch.zeros_like(param)


def require_factory(factory: Any, config: Config) -> None:
    """That ``optimizer=`` of `colossus.initialize` is a function, and the only word about the optimizer.

    Raises:
        ValueError: when it is an optimizer that exists already, or the config has an ``optimizer`` section, too.
    """
    if not callable(factory):
        raise ValueError(
            f"optimizer= is a {type(factory).__name__}; pass a function of the list of (name, parameter) pairs that "
            f"this rank updates, which returns a torch.optim.Optimizer: optimizer=lambda named: "
            f"torch.optim.AdamW(named, lr=1e-3)"
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
    holders: Holders,
    tables: Collection[int] = (),
    groups: ParameterGroups | None = None,
) -> tuple[torch.optim.Optimizer, Config]:
    """The optimizer of this rank, and the config with the learning rate that the schedule starts from.

    ``factory`` is called with (name, parameter) pairs; without one, the config's ``type`` with its options and with
    ``params=``, the parameters, or where it takes ``named_parameters``, with the pairs under that name. Ranks that
    train the same stage must make the same groups. A rank without parameters, or of whose parameters the function takes
    none, has an optimizer that updates nothing. Collective.

    Args:
        params: what this rank updates, as it is stored.
        holders: the ranks that hold them (`holders_of`).
        tables: ids of those of them that have sparse gradients.
        groups: of a config that has rules for them, or of a model with tables.

    Raises:
        ValueError: on all ranks, when what the user's function returns is no optimizer of these parameters, or one that
            computes something else with the parts of parameters that ranks store (`trial_problem`).
    """
    context = holders.context
    if factory is None:
        require_options(config.optimizer, context)
    named = [(spec_of(param).name, param) for param in params]
    made = make_optimizer(factory, config, named, holders, groups)
    problem, untried = None, ""
    if made is not _EMPTY:
        try:
            problem = _problem(made, dict(named), config, context, tables)
        except UntriedError as error:
            untried = str(error)
    #: of each group
    rates: list[float | None] = []
    if made is not _EMPTY and problem is None:
        if factory is None:
            set_table_options(made, config.optimizer)
        for group in made.param_groups if groups is not None else ():
            group["lr"] *= group.pop("lr_scale", 1.0)
        rates = [float(group["lr"]) if "lr" in group else None for group in made.param_groups]
        if tables:
            problem = table_problem(made, {id(param): name for name, param in named if id(param) in tables})
    source = "optimizer.type" if factory is None else "optimizer="
    by_rank = all_gather_object((problem, rates, untried), context.group(context.grid.names))
    for rank, (of_rank, *_) in enumerate(by_rank):
        if of_rank is not None:
            raise ValueError(f"{source}: {of_rank}" + (f" (rank {rank})" if context.world_size > 1 else ""))
    rates = next((found for _, found, _ in by_rank if found), [])
    if context.is_logging_rank and (told := [words for *_, words in by_rank if words]):
        log.warning("%s", told[0])
    if not rates:
        raise ValueError(f"{source}: the optimizer has no parameter on any rank, so nothing would be trained")
    if made is _EMPTY:  # torch's insist on a parameter
        empty: list[dict[str, Any]] = [{"params": [], "lr": rate or 0.0} for rate in rates]
        empty[0]["params"] = [nn.Parameter(torch.zeros(0))]
        made = torch.optim.SGD(empty, lr=0.0, fused=False, foreach=False)
    if factory is not None:
        peak = next((rate for rate in rates if rate), None)
        lr: dict[str, Any] = {} if peak is None else {"lr": peak}
        section = OptimizerSection(type=factory, **lr)
        config = config.model_copy(update={"optimizer": section})
    return made, config


def holders_of(
    module: nn.Module, context: ParallelContext, summed_axes: Iterable[str], sparse: Collection[int] = ()
) -> Holders:
    """The ranks that hold the parameters of a stage and have the same sums of their gradients, over ``summed_axes``.

    Embeddings, and output layers by their class or name, are told apart: their rows stand for tokens or classes.

    Args:
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
    """What the user's function, or the config's, returns; ``_EMPTY`` on a rank where it has nothing to update."""
    if not named:
        return _EMPTY
    section = config.optimizer
    try:
        if factory is not None:
            return factory(list(named))
        params: list[Any] = [param for _, param in named] if groups is None else groups.of(named)
        kind, options = _class_of(section), section.arguments
        if section.whole:
            whole = importlib.import_module("colossus.optim.whole")  # of those who ask for it
            return whole.WholeParameters(params, holders, partial(kind, **options))
        if section.type in TORCH_OPTIMIZERS:
            return torch_optimizer(section.type, params, **options)
        if _takes(kind, "holders"):
            return kind(params, holders, **options)
        if _takes(kind, "named_parameters"):
            return kind(named_parameters=named, **options)
        return kind(params=params, **options)
    except ValueError as error:
        if "empty parameter list" in str(error):  # torch's, where the function picks none of this stage
            return _EMPTY
        raise


def _class_of(section: OptimizerSection) -> Any:
    """What makes the optimizer; classes of torch and our own without what their wrappers import."""
    kind = section.type if callable(section.type) else OPTIMIZERS.get(section.type)
    is_ours = getattr(kind, "__module__", "").startswith(("torch.optim", "colossus.optim"))
    return without_dynamo(kind) if is_ours and isinstance(kind, type) else kind


def _takes(kind: Callable[..., Any], argument: str) -> bool:
    try:
        return argument in inspect.signature(kind).parameters
    except (TypeError, ValueError):
        return False


#: what to take in the place of an optimizer that computes with whole matrices
_WHOLE = (
    "Take an exact one by its name (LAMB, LARS, Adafactor, Muon), let this one have whole parameters, optimizer = "
    "dict(type=.., whole=True), one that works element by element (AdamW, SGD), or a plan that stores parameters whole"
)


def _problem(
    made: Any, named: dict[str, nn.Parameter], config: Config, context: ParallelContext, tables: Collection[int]
) -> str | None:
    """What is wrong with an optimizer of these parameters, in words; see `trial_problem`."""
    kind, names = type(made).__name__, {id(param): name for name, param in named.items()}
    if not isinstance(made, torch.optim.Optimizer):
        return f"the function returned a {kind}; it must return a torch.optim.Optimizer over what it is given"
    held = [param for group in made.param_groups for param in group["params"]]
    if any(id(param) not in names for param in held):
        return (
            "it holds parameters that were not given to it. Make it of the parameters in the pairs that the function "
            "is called with: they are what this rank stores and trains, those of the model need not be"
        )
    if (words := _refusal(type(made))) and not all(id(param) in tables for param in held):
        return f"{kind}: {words}"
    if config.checkpoint.every and (reason := why_not_saved(made)):
        return f"{reason}; or set checkpoint.every = 0"
    sizes = context.grid.sizes
    in_parts = [
        param
        for param in held
        if id(param) not in tables and any(sizes[axis] > 1 for axis in spec_of(param).layout.shard_axes)
    ]
    if in_parts and (words := trial_problem(made, in_parts)):
        return (
            f"{words}, and this rank stores a part of {names[id(in_parts[0])]}: what is trained would depend on the "
            f"plan. {_WHOLE}"
        )
    return None


def _refusal(kind: type) -> str | None:
    """Why no run has this class of torch."""
    return next((why for name, why in OPTIMIZERS.refused.items() if issubclass(kind, getattr(torch.optim, name))), None)


def require_options(section: OptimizerSection, context: ParallelContext) -> None:
    """That the class of a config takes the values of its options, those of its groups, too: by making it once, of a
    parameter of its own.

    Raises:
        ConfigError: with what the class says, and the option, where it is one.
    """
    kind = _class_of(section)
    name = getattr(kind, "__name__", str(kind))
    if (section.has_groups or section.tables is not None) and _takes(kind, "named_parameters"):
        raise ConfigError(
            f"optimizer.groups, layer_decay, tables: {name} takes named_parameters, of which it makes groups itself: "
            f"leave them out, or let it take params"
        )
    if section.whole and _takes(kind, "holders"):
        raise ConfigError(
            f"optimizer.whole: {name} looks at whole parameters by itself, and sends less for it: leave whole out"
        )
    if not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)) or _takes(kind, "named_parameters"):
        return
    if words := _refusal(kind):
        raise ConfigError(f"optimizer.type: {name}: {words}")
    of_groups = GROUP_OPTIONS.get(section.type, ()) if isinstance(section.type, str) else ()
    sections = {"optimizer": section.arguments}
    for number, rule in enumerate(section.groups):
        own = {key: value for key, value in rule.options.items() if key not in of_groups}
        sections[f"optimizer.groups.{number}"] = own
    for key, own in sections.items():
        if words := _options_refused(kind, {**section.arguments, **own}, own, context):
            raise ConfigError(f"{key}{words}")


def _options_refused(
    kind: Callable[..., Any], options: dict[str, Any], own: Iterable[str], context: ParallelContext
) -> str | None:
    """What a class says when it is made with these options; of those in ``own`` the one without which it does not."""
    holders = {"holders": Holders(context, ())} if _takes(kind, "holders") else {}

    def refused(**options: Any) -> str | None:
        try:
            kind([nn.Parameter(torch.zeros(2, 2))], **holders, **options)
        except (TypeError, ValueError) as error:
            return str(error)
        return None

    words = refused(**options)
    if words is None:
        return None
    for name in own:
        if refused(**{key: value for key, value in options.items() if key != name}) is None:
            return f".{name}: {words}" + ("" if "got " in words else f", got {brief(options[name])}")
    return f": {words}"
