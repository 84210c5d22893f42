"""`parallelize`: an unchanged model of plain torch, or of transformers, under every plan."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from colossus.construct.allocate import is_building
from colossus.context.parallel_context import current_context
from colossus.convert.expert_swap import is_experts
from colossus.convert.forward_chain import make_chain
from colossus.convert.meta_run import with_trials
from colossus.convert.pairs import Pairs, find_pairs
from colossus.convert.swap import (
    COLUMN,
    EXPERTS,
    KINDS,
    ROW,
    TABLES,
    TORCH,
    WHOLE,
    Swap,
    Swapper,
    is_linear,
)
from colossus.layers.linear import Linear, share_input
from colossus.layers.model_parallel import model_parallel_of
from colossus.layers.pipeline_block import is_chain
from colossus.registry import nearest

#: the modules that a rule of a kind names, where they are no linears
_WHAT = {EXPERTS: "modules of experts", TORCH: "modules"}


def parallelize(
    factory: Callable[[], nn.Module],
    rules: Mapping[str, str] | None = None,
    *,
    example: Any = None,
    blocks: str | Sequence[str] | None = None,
) -> Callable[[], nn.Module]:
    """Return a factory for `colossus.initialize` of a model that does not know colossus.

        make = colossus.parallelize(lambda: AutoModelForCausalLM.from_config(config))
        engine = colossus.initialize("config.py", model=make, loss_fn=loss)

    The model is built on the meta device, and its ``nn.Linear``, ``nn.Embedding``, ``nn.EmbeddingBag``, ``nn.Dropout``
    and batch norms, and transformers' ``Conv1D``, become the layers of colossus that compute the same. Each takes and
    returns whole activations, so that the model's code stays right. Its initial values are those that it has in plain
    torch under the same names. Its state dict keeps names and shapes, except that ``Conv1D``'s weight is [out, in].

    Activations between two linears stay split where ``rules`` say so, or where a run of the model on the meta device
    shows that all code there works on split features (heads are features). Such a pair saves moving them.

    Args:
        factory: a class or function without arguments.
        rules: pattern (`fnmatch`) of module names -> kind. Linears: ``"column"``, ``"row"``, ``"whole"`` or ``"head"``
            (it returns a rank's part of the logits, for `colossus.layers.cross_entropy`). transformers' experts:
            ``"experts"``, which `parallel.expert` spreads over ranks, or ``"whole"``. Any module: ``"torch"``, which
            leaves it and its children as they are, whole on each rank. The first rule that matches a name applies,
            before automatic pairs. A ruled pair whose sizes do not divide is an error.
        example: an input of the model with a few samples: a tensor, or a dict of arguments, with masks if batches have
            them. Finding pairs and a pipeline need it. Models of transformers get two from their config, with and
            without masks, and pairs hold in both.
        blocks: for a pipeline: the name of the list of blocks, or the names of the blocks; by default the list of one
            class with the most parameters.

    Returns:
        The factory. A batch whose inputs are a dict is passed as keyword arguments.

    Raises, when the factory is called:
        ValueError: a rule matches no linear, or a linear cannot follow its rule, or no model is being built.
    """

    def make() -> nn.Module:
        if not is_building():
            raise ValueError(
                "a factory of colossus.parallelize can only be called while a model is built: pass it to "
                "colossus.initialize(model=...) or colossus.build(...)"
            )
        model, make_trial = with_trials(partial(_without_cache, factory))
        return _converted(model, make_trial, rules or {}, example, blocks) if isinstance(model, nn.Module) else model

    name = getattr(factory, "__name__", type(factory).__name__)
    make.__name__ = make.__qualname__ = name  # the name under which a config shows its model
    return make


@dataclass(frozen=True)
class Conversion:
    """The result of `parallelize` for a model.

    Attributes:
        swaps: name of a module -> its swap.
        shared: groups of linears with one input tensor, which moves once for all of them.
        note: why no search for pairs took place; empty where it did.
    """

    swaps: Mapping[str, Swap]
    shared: tuple[tuple[str, ...], ...] = ()
    note: str = ""


def conversion_of(model: nn.Module) -> Conversion | None:
    """Return the conversion of a model that `parallelize` made, else None."""
    return vars(model).get("_colossus_conversion")


def _without_cache(factory: Callable[[], nn.Module]) -> nn.Module:
    """Return the factory's model with caching of keys and values off, since a train step never reads the cache.

    `colossus.hf.save` writes the configs as they were.
    """
    model = factory()
    cached: list[Any] = []
    for module in model.modules() if isinstance(model, nn.Module) else ():
        if getattr(config := getattr(module, "config", None), "use_cache", False):
            config.use_cache = False  # type: ignore[union-attr]
            cached.append(config)
    if cached:
        vars(model)["_colossus_cached"] = cached
    return model


def _converted(
    model: nn.Module,
    make_trial: Callable[[], nn.Module],
    rules: Mapping[str, str],
    example: Any,
    blocks: str | Sequence[str] | None,
) -> nn.Module:
    context = current_context()
    examples = [*([] if example is None else [example]), *examples_of(model)]
    if context.size("pipeline") > 1 and (blocks is not None or not is_chain(model)):
        if not examples:
            raise ValueError(
                f"{type(model).__name__}: parallel.pipeline = {context.size('pipeline')} finds the blocks of a model "
                f"by running it, and needs an example of its input with a few samples: pass "
                f"example=torch.zeros(2, ..), or a dict of arguments, to colossus.parallelize or in the config's "
                f"model = dict(type='torch', ..). Or define the model's blocks (def pipeline_blocks)"
            )
        make_chain(model, examples[0], blocks, trial=make_trial())
    linears = [name for name, module in model.named_modules() if is_linear(module)]
    experts = [name for name, module in model.named_modules() if is_experts(module)]
    ruled = _by_rules(rules, [name for name, _ in model.named_modules()], linears, experts)
    if _is_reference.get():
        ruled = {name: TORCH for name, module in model.named_modules() if isinstance(module, TABLES)}
    pairs, note = Pairs(), ""
    if context.size("tensor") > 1:
        pairs, note = _search_pairs(make_trial, examples, ruled)
    over_ranks = dict.fromkeys(experts, EXPERTS) if context.grid.expert_axes or context.size("sequence") > 1 else {}
    used_past = {name: TORCH for name in pairs.used_past if ruled.get(name) not in (COLUMN, ROW)}
    kinds = {**over_ranks, **pairs.splits, **ruled, **used_past}
    swapper = Swapper(model, kinds, pairs.reasons)
    model = swapper.run()
    for group in pairs.shared:
        share_input([module for name in group if isinstance(module := model.get_submodule(name), Linear)])
    vars(model)["_colossus_conversion"] = Conversion(swapper.swaps, pairs.shared, note)
    if context.size("pipeline") == 1:  # a pipeline calls its blocks, not the model
        model.register_forward_pre_hook(_name_arguments, with_kwargs=True)
    return model


_is_reference = ContextVar("is_reference", default=False)


@contextmanager
def as_reference() -> Iterator[None]:
    """Leave modules with weights torch's own inside the context, for the reference run in one process."""
    token = _is_reference.set(True)
    try:
        yield
    finally:
        _is_reference.reset(token)


def examples_of(model: nn.Module) -> list[dict[str, Tensor]]:
    """Return inputs of a model of transformers, two samples each, without and with masks; of other models none."""
    config: Any = getattr(model, "config", None)
    name = getattr(model, "main_input_name", None)
    if config is None or name is None:
        return []
    if name == "pixel_values" and hasattr(config, "num_channels"):
        size = getattr(config, "image_size", 224)  # a network of convolutions takes any size
        height, width = size if isinstance(size, list | tuple) else (size, size)
        return [{name: torch.zeros(2, config.num_channels, height, width, device="meta")}]
    if name != "input_ids":
        return []
    ids = torch.zeros(2, 4, dtype=torch.int64, device="meta")
    example = {name: ids, "decoder_input_ids": ids} if getattr(config, "is_encoder_decoder", False) else {name: ids}
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]])
    return [example, example | {key.replace("input_ids", "attention_mask"): mask for key in example}]


def _by_rules(
    rules: Mapping[str, str], modules: Sequence[str], linears: Sequence[str], experts: Sequence[str]
) -> dict[str, str]:
    """Return name -> kind of the linears, experts and modules that stay torch's, for the names that a rule matches.

    Raises:
        ValueError: a rule has another kind, or matches no name.
    """
    kinds: dict[str, str] = {}
    for pattern, kind in rules.items():
        if kind not in KINDS:
            raise ValueError(f"rules: {pattern!r}: {kind!r} is none of {', '.join(map(repr, KINDS))}")
        candidates = {WHOLE: [*linears, *experts], EXPERTS: experts, TORCH: modules}.get(kind, linears)
        matches = [name for name in candidates if fnmatchcase(name, pattern)]
        if kind == TORCH:  # the rule covers the modules inside them, too
            inside = tuple(f"{name}." if name else "" for name in matches)
            matches += [name for name in modules if name.startswith(inside)]
        if not matches:
            close, what = nearest(pattern, list(candidates)), _WHAT.get(kind, "linears")
            hint = f"; did you mean {close!r}?" if close else ""
            raise ValueError(f"rules: {pattern!r} matches none of the {len(candidates)} {what} of the model{hint}")
        for name in matches:
            kinds.setdefault(name, kind)
    return kinds


def _search_pairs(
    make_trial: Callable[[], nn.Module], examples: Sequence[Any], ruled: Container[str]
) -> tuple[Pairs, str]:
    """Return the pairs of a model beside the linears with rules, and why no search took place."""
    if not examples:
        return Pairs(), "there is no example, so no pairs are looked for"
    try:
        return find_pairs(make_trial, examples, model_parallel_of(current_context()), ruled), ""
    except ValueError as error:  # without a trial no pair is safe, since a step could refuse it
        return Pairs(), str(error)


def _name_arguments(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Replace a single dict argument by its entries as keyword arguments, as a forward pre-hook."""
    if len(args) == 1 and not kwargs and isinstance(args[0], dict) and args[0]:
        parameters = inspect.signature(model.forward).parameters.values()
        takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
        if takes_any or {*args[0]} <= {parameter.name for parameter in parameters}:
            return (), args[0]
    return None
