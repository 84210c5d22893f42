"""`parallelize`: a model of plain torch, or of transformers, as it is, under every plan."""

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

#: what a rule of a kind names, where that is no linear
_WHAT = {EXPERTS: "modules of experts", TORCH: "modules"}


def parallelize(
    factory: Callable[[], nn.Module],
    rules: Mapping[str, str] | None = None,
    *,
    example: Any = None,
    blocks: str | Sequence[str] | None = None,
) -> Callable[[], nn.Module]:
    """A factory for `colossus.initialize` of a model that knows nothing of colossus.

        make = colossus.parallelize(lambda: AutoModelForCausalLM.from_config(config))
        engine = colossus.initialize("config.py", model=make, loss_fn=loss)

    The model is built on the meta device, and its ``nn.Linear``, ``nn.Embedding``, ``nn.EmbeddingBag``, ``nn.Dropout``
    and batch norms, and transformers' ``Conv1D``, become the layers of colossus that compute the same. Each takes and
    gives whole activations, so that the model is right as it is written. Its first values are those that it has in
    plain torch by the same names; its state dict keeps names, and shapes but for ``Conv1D``'s weight, which is
    [out, in].

    What is between two linears stays split where ``rules`` say so, or where a run of the model on the meta device shows
    that everything there works on split features (heads are features): such a pair saves moving what is between.

    Args:
        factory: a class or function without arguments.
        rules: pattern (`fnmatch`) of the names of linears -> ``"column"``, ``"row"``, ``"head"`` (gives a rank's part
            of the logits, for `colossus.layers.cross_entropy`), ``"whole"``; of transformers' experts, which
            `parallel.expert` spreads over ranks, ``"experts"`` or ``"whole"``; of any module ``"torch"``, which leaves
            it, and what is in it, as it is, whole on each rank. The first that meets a name counts, before what is
            found. A pair whose sizes do not divide is an error then.
        example: of what the model is called with, of a few samples: a tensor, or a dict of arguments, with masks if
            batches have them. It is needed for pairs to be found, and for a pipeline; of transformers' models two are
            made from their config, with and without masks, and pairs hold in both.
        blocks: for a pipeline: the name of the list of blocks, or the names of the blocks; by default the list of one
            class with the most parameters.

    Returns:
        The factory. A batch whose inputs are a dict of names of arguments calls the model with these.

    Raises, when the factory is called:
        ValueError: for a rule that meets no linear, or that a linear cannot follow; outside of a build.
    """

    def make() -> nn.Module:
        if not is_building():
            raise ValueError(
                "a factory of colossus.parallelize is called while a model is built: pass it to "
                "colossus.initialize(model=...) or colossus.build(...)"
            )
        model, make_trial = with_trials(partial(_without_cache, factory))
        return _converted(model, make_trial, rules or {}, example, blocks) if isinstance(model, nn.Module) else model

    name = getattr(factory, "__name__", type(factory).__name__)
    make.__name__ = make.__qualname__ = name  # as which a config's model is shown
    return make


@dataclass(frozen=True)
class Conversion:
    """What `parallelize` has made of a model.

    Attributes:
        swaps: by name of the module.
        shared: linears that are given one tensor, which moves for all of them once.
        note: why no pairs were looked for; empty where they were.
    """

    swaps: Mapping[str, Swap]
    shared: tuple[tuple[str, ...], ...] = ()
    note: str = ""


def conversion_of(model: nn.Module) -> Conversion | None:
    """None of a model that `parallelize` has not made."""
    return vars(model).get("_colossus_conversion")


def _without_cache(factory: Callable[[], nn.Module]) -> nn.Module:
    """Return its model. What a cache of keys and values would keep, a train step never reads; `colossus.hf.save` writes
    the configs as they came."""
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
                f"in a run of it, for which it needs an example of what it is called with, of a few samples: "
                f"example=torch.zeros(2, ..), or a dict of arguments, for colossus.parallelize or in the config's "
                f"model = dict(type='torch', ..). Or let the model say what its blocks are (def pipeline_blocks)"
            )
        make_chain(model, examples[0], blocks, trial=make_trial())
    linears = [name for name, module in model.named_modules() if is_linear(module)]
    experts = [name for name, module in model.named_modules() if is_experts(module)]
    given = _by_rules(rules, [name for name, _ in model.named_modules()], linears, experts)
    if _is_reference.get():
        given = {name: TORCH for name, module in model.named_modules() if isinstance(module, TABLES)}
    found, note = Pairs(), ""
    if context.size("tensor") > 1:
        found, note = _found_pairs(make_trial, examples, given)
    over_ranks = dict.fromkeys(experts, EXPERTS) if context.grid.expert_axes else {}
    used_past = {name: TORCH for name in found.used_past if given.get(name) not in (COLUMN, ROW)}
    kinds = {**over_ranks, **found.splits, **given, **used_past}
    swapper = Swapper(model, kinds, found.reasons)
    model = swapper.run()
    for group in found.shared:
        share_input([module for name in group if isinstance(module := model.get_submodule(name), Linear)])
    vars(model)["_colossus_conversion"] = Conversion(swapper.swaps, found.shared, note)
    if context.size("pipeline") == 1:  # else its blocks are called, and not the model
        model.register_forward_pre_hook(_name_arguments, with_kwargs=True)
    return model


_is_reference = ContextVar("is_reference", default=False)


@contextmanager
def as_reference() -> Iterator[None]:
    """Inside, modules with weights stay torch's own: for the run in one process that a plan is compared with."""
    token = _is_reference.set(True)
    try:
        yield
    finally:
        _is_reference.reset(token)


def examples_of(model: nn.Module) -> list[dict[str, Tensor]]:
    """Return what a model of transformers can be called with: two samples, of tokens without masks and with masks.

    Of any other model it is nothing."""
    config: Any = getattr(model, "config", None)
    name = getattr(model, "main_input_name", None)
    if config is None or name is None:
        return []
    if name == "pixel_values" and hasattr(config, "num_channels"):
        size = getattr(config, "image_size", 224)  # a network of convolutions takes any
        height, width = size if isinstance(size, list | tuple) else (size, size)
        return [{name: torch.zeros(2, config.num_channels, height, width, device="meta")}]
    if name != "input_ids":
        return []
    ids = torch.zeros(2, 4, dtype=torch.int64, device="meta")
    example = {name: ids, "decoder_input_ids": ids} if getattr(config, "is_encoder_decoder", False) else {name: ids}
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]])
    return [example, example | {each.replace("input_ids", "attention_mask"): mask for each in example}]


def _by_rules(
    rules: Mapping[str, str], modules: Sequence[str], linears: Sequence[str], experts: Sequence[str]
) -> dict[str, str]:
    """Return the kind of each linear, of experts and of what stays torch's, by name, of those that a rule meets.

    Raises:
        ValueError: for a rule of another kind, or that meets none.
    """
    kinds: dict[str, str] = {}
    for pattern, kind in rules.items():
        if kind not in KINDS:
            raise ValueError(f"rules: {pattern!r}: {kind!r} is none of {', '.join(map(repr, KINDS))}")
        known = {WHOLE: [*linears, *experts], EXPERTS: experts, TORCH: modules}.get(kind, linears)
        met = [name for name in known if fnmatchcase(name, pattern)]
        if kind == TORCH:  # and what is in them
            inside = tuple(f"{name}." if name else "" for name in met)
            met += [name for name in modules if name.startswith(inside)]
        if not met:
            close, what = nearest(pattern, list(known)), _WHAT.get(kind, "linears")
            hint = f"; did you mean {close!r}?" if close else ""
            raise ValueError(f"rules: {pattern!r} meets none of the {len(known)} {what} of the model{hint}")
        for name in met:
            kinds.setdefault(name, kind)
    return kinds


def _found_pairs(
    make_trial: Callable[[], nn.Module], examples: Sequence[Any], given: Container[str]
) -> tuple[Pairs, str]:
    """Return the pairs of a model beside those that are given, and why none are looked for."""
    if not examples:
        return Pairs(), "no example is given, so no pairs are looked for"
    try:
        return find_pairs(make_trial, examples, model_parallel_of(current_context()), given), ""
    except ValueError as error:  # what a plan of the model's own says is not tried: a step could refuse it
        return Pairs(), str(error)


def _name_arguments(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A forward pre-hook: a dict of arguments in the place of the first one becomes these."""
    if len(args) == 1 and not kwargs and isinstance(args[0], dict) and args[0]:
        known = inspect.signature(model.forward).parameters.values()
        takes_any = any(each.kind is each.VAR_KEYWORD for each in known)
        if takes_any or {*args[0]} <= {each.name for each in known}:
            return (), args[0]
    return None
