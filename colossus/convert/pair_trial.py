"""A run of a model on the meta device in which its linears are columns and rows of pairs: is that refused?"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from colossus.convert.derived_classes import torch_class_of
from colossus.convert.meta_run import run_on_meta
from colossus.convert.swap import COLUMN, ROW, weight_shape
from colossus.layers.model_parallel import ModelParallel
from colossus.layout.operators import tensors_of
from colossus.sharded_tensor.tensor import ShardedTensor, plain, wrap
from colossus.tensor_parallel.choose_sharding import IndivisibleSize

_NONE: frozenset[str] = frozenset()


class _Refused(Exception):
    """Ends a run: these columns cannot give split features."""

    def __init__(self, names: Iterable[str], why: str) -> None:
        super().__init__(why)
        self.names, self.why = frozenset(names), why


class PairTrial(TorchFunctionMode):
    """A run in which linears are columns and rows of pairs. As a mode it follows which columns a tensor comes from.

    What is between a column and a row runs backward, too, when the row is reached: a user's own autograd function may
    meet parts there alone. Elsewhere nothing does.

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
        #: of columns, from which what follows was computed
        self._outputs: dict[str, list[Tensor]] = defaultdict(list)
        self._runs_backward = False
        #: of the last tensor of a column that anything was done with
        self._last = _NONE
        whole, inner = parallel.regions.whole, parallel.regions.inner
        size = parallel.context.size
        self._samples_ways, self._inner_ways = (size(each.batch) if each.batch else 1 for each in (whole, inner))
        self._features_ways = size(inner.features) if inner.features else 1

    def run(self, example: Any) -> dict[str, str]:
        """Return why a column cannot be one, by its name; nothing for a run in which all could."""
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
            return dict.fromkeys(names, what_it_says(error))
        refused: dict[str, str] = {}
        for leaf in tree_leaves(output):
            refused |= dict.fromkeys(_sources(leaf), "its features reach the model's output")
        for name in self.linears:
            if self.roles.get(name) == COLUMN and name not in self._paired:
                refused.setdefault(name, "its features reach no other linear")
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
                raise _Refused(sources, f"{name}, which takes its features, cannot be a row: {what_it_says(sharding)}")
            self.reasons[name] = what_it_says(sharding)
            return _made(x, x.shape[0], out_features).clone()
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
        made = _made(x, samples, out_features // self._features_ways)
        self._outputs[name].append(made)
        out = wrap(made.clone(), placement.moved(self._parallel.regions.inner, x.dim()))
        vars(out)["_sources"] = self._last = frozenset({name})
        return out

    def _row(self, name: str, x: ShardedTensor, in_features: int, out_features: int) -> Tensor:
        local, placement, sources = plain(x), x.placement, _sources(x)
        if not placement.is_standard(local.dim()) or local.shape[-1] * self._features_ways != in_features:
            raise _Refused(
                sources,
                f"{name}, which takes its features, has {in_features} in the last dim, but they come as {x!r}",
            )
        self._run_backward(local, sources)
        self._paired |= sources
        return _made(local, local.shape[0] * self._inner_ways // self._samples_ways, out_features).clone()

    def _run_backward(self, x: Tensor, sources: frozenset[str]) -> None:
        """Run backward what is between columns and the row that ``x``, a rank's part, is given to."""
        if self._runs_backward or not x.requires_grad:  # what is checkpointed runs forward again meanwhile
            return
        columns = [output for name in sources for output in self._outputs[name]]
        self._runs_backward = True
        try:
            torch.autograd.grad(x, columns, _on_meta(x.shape, x.dtype), retain_graph=True, allow_unused=True)
        except Exception as error:
            raise _Refused(sources, f"in backward, {what_it_says(error)}") from error
        finally:
            self._runs_backward = False

    # -- what is between them -----------------------------------------------------------------------------

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        sources = _NONE.union(*map(_sources, tensors_of((args, kwargs))))
        if not sources:
            return func(*args, **kwargs)
        self._last = sources
        try:
            out = func(*args, **kwargs)
        except (ValueError, RuntimeError, IndexError) as error:
            raise _Refused(sources, what_it_says(error)) from error
        for leaf in tree_leaves(out):
            if isinstance(leaf, ShardedTensor):
                vars(leaf)["_sources"] = sources
        return out


def _made(x: Tensor, samples: int, features: int) -> Tensor:
    """Return what a linear makes of ``x``, of so many samples; as a leaf, which code may not write to."""
    return _on_meta((samples, *x.shape[1:-1], features), x.dtype).requires_grad_()


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


def what_it_says(error: Exception | list[IndivisibleSize]) -> str:
    """Return an error in one line, and the place in the model, without what it says of remedies."""
    if isinstance(error, list):
        return "; ".join(map(str, error))
    what, _, place = str(error).partition("\n")
    what = re.sub(r" \([a-z](?:[^()]|\([^()]*\))*\)", "", what.partition(". Its input is")[0])
    return " ".join(filter(None, (what, place.partition("\n")[0])))
