"""Which linears of a model that is not changed can be column/row pairs: found by a run of it on the meta device.

In that run each linear that is given whole features gives split ones, as a column linear does, and one that is given
split features takes them, as a row linear does. What is between them runs on `ShardedTensor`s of the shapes that a rank
has, under the rules of these: what is refused there would be refused in a train step, so those columns are whole in
the next run. The first run in which nothing is refused has the pairs.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from colossus.convert.derived_classes import torch_class_of
from colossus.convert.meta_run import run_on_meta
from colossus.convert.past_uses import WHY as USED_PAST
from colossus.convert.past_uses import of_any_layer, weights_used_past
from colossus.convert.swap import COLUMN, ROW, holders_of, is_linear, weight_shape, why_not_its_class
from colossus.layers.model_parallel import ModelParallel
from colossus.sharded_tensor.operators import tensors_of
from colossus.sharded_tensor.tensor import ShardedTensor, plain, wrap
from colossus.tensor_parallel.choose_sharding import IndivisibleSize

_NONE: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Pairs:
    """The column/row pairs of a model.

    Attributes:
        splits: name of a linear -> ``"column"`` or ``"row"``.
        shared: columns of one module that are given the same tensor, for `colossus.layers.linear.share_input`.
        reasons: name of any other linear -> why it is whole.
        used_past: names of modules whose weight is used otherwise than by a call of them.
    """

    splits: Mapping[str, str] = field(default_factory=dict)
    shared: tuple[tuple[str, ...], ...] = ()
    reasons: Mapping[str, str] = field(default_factory=dict)
    used_past: Collection[str] = ()


def find_pairs(
    make: Callable[[], nn.Module], example: Any, parallel: ModelParallel, whole: Container[str] = ()
) -> Pairs:
    """Return the column/row pairs among the linears of a model. Layers of one number or another decide alike.

    Args:
        make: makes a model on meta, for one run.
        example: an input of the model, with the samples of one rank, as of `run_on_meta`.
        whole: names of linears that are no candidates.

    Raises:
        ValueError: for a forward that does not run on meta.
    """
    model = make()
    linears = {name: module for name, module in model.named_modules() if is_linear(module) and name not in whole}
    reasons = _not_alone(model, linears)
    try:
        used_past = weights_used_past(model, example)
    except Exception as error:
        raise ValueError(
            f"{type(model).__name__} does not run on the meta device, so no pairs are found: {_told(error)}"
        ) from error
    reasons |= dict.fromkeys(used_past, USED_PAST)
    while True:
        trial = _Trial(make(), parallel, [name for name in linears if name not in reasons])
        refused = trial.run(example)
        if not refused:
            return Pairs(trial.roles, trial.shared(), reasons | trial.reasons, used_past)
        for name in trial.linears:
            for other, why in refused.items():
                if of_any_layer(name) == of_any_layer(other):
                    reasons.setdefault(name, why)


def _not_alone(model: nn.Module, linears: Mapping[str, nn.Module]) -> dict[str, str]:
    """Name of a linear -> why it is no candidate, of those that share a parameter or are more than their class."""
    holders, reasons = holders_of(model), {}
    for name, module in linears.items():
        others = [
            other or type(model).__name__
            for parameter in module._parameters.values() if parameter is not None
            for other, holder, _ in holders[id(parameter)] if holder is not module
        ]  # fmt: skip
        if others:
            reasons[name] = f"shares a parameter with {', '.join(dict.fromkeys(others))}"
        elif why := why_not_its_class(module):
            reasons[name] = why
    return reasons


class _Refused(Exception):
    """Ends a run: these columns cannot give split features."""

    def __init__(self, names: Iterable[str], why: str) -> None:
        super().__init__(why)
        self.names, self.why = frozenset(names), why


class _Trial(TorchFunctionMode):
    """A run in which linears are columns and rows of pairs. As a mode it follows which columns a tensor comes from.

    Attributes:
        roles: name of a linear -> what it was in the run.
        reasons: name of a linear that was neither -> why.
    """

    def __init__(self, model: nn.Module, parallel: ModelParallel, linears: Sequence[str]) -> None:
        super().__init__()
        self._model, self._parallel = model, parallel
        self.linears = {name: model.get_submodule(name) for name in linears}
        self.roles: dict[str, str] = {}
        self.reasons: dict[str, str] = {}
        self._calls: Counter[str] = Counter()
        self._paired: set[str] = set()
        self._inputs: list[tuple[Tensor, str]] = []
        #: of the last tensor of a column that anything was done with
        self._last = _NONE
        whole, inner = parallel.regions.whole, parallel.regions.inner
        self._samples_move = whole.batch != inner.batch
        size = parallel.context.size
        self._samples_ways, self._inner_ways = (size(each.batch) if each.batch else 1 for each in (whole, inner))
        self._features_ways = size(inner.features) if inner.features else 1

    def run(self, example: Any) -> dict[str, str]:
        """Name of a column -> why it cannot be one; nothing for a run in which all could."""
        calls: dict[str, Callable[..., Any]] = {
            name: partial(self._linear, name, each) for name, each in self.linears.items()
        }
        for name, module in self._model.named_modules():
            if torch_class_of(module) is nn.Dropout:
                calls[name] = partial(_dropped, module)
        try:
            with self:
                output, _ = run_on_meta(self._model, example, calls)
        except _Refused as ended:
            return dict.fromkeys(ended.names, ended.why)
        except Exception as error:
            names = self._last or [name for name, role in self.roles.items() if role == COLUMN]
            if not names:
                raise
            return dict.fromkeys(names, _told(error))
        refused: dict[str, str] = {}
        for leaf in tree_leaves(output):
            refused |= dict.fromkeys(_sources(leaf), "its features reach the model's output")
        for name in self.linears:
            if self.roles.get(name) == COLUMN and name not in self._paired:
                refused.setdefault(name, "its features reach no other linear")
            elif name not in self.roles:
                self.reasons.setdefault(name, "the forward does not call it")
        return refused

    def shared(self) -> tuple[tuple[str, ...], ...]:
        groups: dict[tuple[int, str], list[str]] = defaultdict(list)
        for x, name in self._inputs:
            if self._calls[name] == 1:
                groups[id(x), name.rpartition(".")[0]].append(name)
        return tuple(tuple(group) for group in groups.values() if len(group) > 1)

    # -- linears ------------------------------------------------------------------------------------------

    def _linear(self, name: str, module: nn.Module, x: Tensor) -> Tensor:
        out_features, in_features = weight_shape(module)
        is_split = isinstance(x, ShardedTensor) and not x.placement.is_whole
        role, sources = (ROW, _sources(x)) if is_split else (COLUMN, frozenset({name}))
        self._calls[name] += 1
        assert self._parallel.shardings is not None
        sharding = self._parallel.shardings.choose(role, in_features, {"": out_features})
        if isinstance(sharding, list):
            if is_split:
                raise _Refused(sources, f"{name}, which takes its features, cannot be a row: {_told(sharding)}")
            self.reasons[name] = _told(sharding)
            return self._made(x, x.shape[0], out_features)
        if self.roles.setdefault(name, role) != role:
            raise _Refused({name, *sources}, f"{name} is called with whole and with split features")
        if isinstance(x, ShardedTensor) and is_split:
            return self._row(name, x, in_features, out_features)
        return self._column(name, x, out_features)

    def _column(self, name: str, x: Tensor, out_features: int) -> Tensor:
        samples, indivisible = divmod(x.shape[0] * self._samples_ways, self._inner_ways)
        if x.dim() < 2 or indivisible:
            raise _Refused(
                {name},
                f"its input of shape {tuple(x.shape)} has no samples in dim 0 that divide over the "
                f"{self._inner_ways} ranks that split them inside of a pair",
            )
        self._inputs.append((x, name))
        placement = x.placement if isinstance(x, ShardedTensor) else self._parallel.whole_placement
        made = self._made(x, samples, out_features // self._features_ways)
        out = wrap(made, placement.moved(self._parallel.regions.inner, x.dim()))
        vars(out)["_sources"] = self._last = frozenset({name})
        return out

    def _row(self, name: str, x: ShardedTensor, in_features: int, out_features: int) -> Tensor:
        local, placement, sources = plain(x), x.placement, _sources(x)
        if not placement.is_standard(local.dim()) or local.shape[-1] * self._features_ways != in_features:
            raise _Refused(
                sources,
                f"{name}, which takes its features, has {in_features} in the last dim, but they come as {x!r}",
            )
        self._paired |= sources
        return self._made(local, local.shape[0] * self._inner_ways // self._samples_ways, out_features)

    def _made(self, x: Tensor, samples: int, features: int) -> Tensor:
        return _on_meta((samples, *x.shape[1:-1], features), x.dtype)

    # -- what is between them -----------------------------------------------------------------------------

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        sources = _NONE.union(*map(_sources, tensors_of((args, kwargs))))
        if not sources:
            return func(*args, **kwargs)
        self._last = sources
        if func is torch.nn.functional.scaled_dot_product_attention:
            args, kwargs = self._without_mask(sources, args, kwargs)
        try:
            out = func(*args, **kwargs)
        except (ValueError, RuntimeError, IndexError) as error:
            raise _Refused(sources, _told(error)) from error
        for leaf in tree_leaves(out):
            if isinstance(leaf, ShardedTensor):
                vars(leaf)["_sources"] = sources
        return out

    def _without_mask(
        self, sources: frozenset[str], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of an attention without a plain mask, of which a train step takes the rank's part."""
        given = {**dict(zip(("query", "key", "value", "attn_mask"), args, strict=False)), **kwargs}
        mask, query = given.get("attn_mask"), given["query"]
        if mask is None or isinstance(mask, ShardedTensor):
            return args, kwargs
        if query.dim() != 4:
            raise _Refused(sources, f"a mask meets queries of shape {tuple(query.shape)}, without a dim of heads")
        if self._samples_move and mask.dim() == 4 and mask.shape[0] > 1:
            raise _Refused(
                sources,
                "a mask of each sample meets an attention whose samples other ranks have; not all of them need to have "
                "a mask, too",
            )
        return args[:3], {name: value for name, value in kwargs.items() if name != "attn_mask"}


def _on_meta(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A tensor without values, on which nothing may branch; in a `ForwardFlow` one of its own would get some."""
    with _disable_current_modes():
        return torch.empty(shape, dtype=dtype, device="meta")


def _sources(x: Any) -> frozenset[str]:
    """The columns that a tensor's split features come from."""
    found: frozenset[str] = vars(x).get("_sources", _NONE) if isinstance(x, ShardedTensor) else _NONE
    return found


def _dropped(module: nn.Dropout, x: Tensor) -> Tensor:
    """`colossus.layers.Dropout`, which takes its place, is right on any part."""
    return x if _sources(x) else nn.functional.dropout(x, module.p, module.training)


def _told(error: Exception | list[IndivisibleSize]) -> str:
    """What an error says in one line, and the place in the model, without what it says of remedies."""
    if isinstance(error, list):
        return "; ".join(map(str, error))
    what, _, place = str(error).partition("\n")
    what = re.sub(r" \([a-z](?:[^()]|\([^()]*\))*\)", "", what.partition(". Its input is")[0])
    return " ".join(filter(None, (what, place.partition("\n")[0])))
