"""A run of a model on the meta device with its linears as columns and rows of pairs, to see if that is refused."""

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
    """The end of a run, because these columns cannot return split features."""

    def __init__(self, names: Iterable[str], why: str) -> None:
        super().__init__(why)
        self.names, self.why = frozenset(names), why


class PairTrial(TorchFunctionMode):
    """A run in which linears are columns and rows of pairs. As a mode it tracks the columns behind each tensor.

    When a row is reached, the code between it and its columns runs backward, too, since a user's own autograd function
    may meet parts only there. No other code runs backward.

    Attributes:
        roles: name of a linear -> its role in the run.
        reasons: name of a linear that had no role -> the reason.
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
        #: the outputs of columns, from which later tensors were computed
        self._outputs: dict[str, list[Tensor]] = defaultdict(list)
        self._runs_backward = False
        #: the columns behind the last tensor with split features that an operation took
        self._last = _NONE
        whole, inner = parallel.regions.whole, parallel.regions.inner
        size = parallel.context.size
        self._samples_ways, self._inner_ways = (size(r.batch) if r.batch else 1 for r in (whole, inner))
        self._features_ways = size(inner.features) if inner.features else 1

    def run(self, example: Any) -> dict[str, str]:
        """Return the columns that cannot be columns -> the reason; an empty dict if all could."""
        calls: dict[str, Callable[..., Any]] = {
            name: partial(self._linear, name, linear) for name, linear in self.linears.items()
        }
        for name, module in self._model.named_modules():
            if torch_class_of(module) is nn.Dropout:
                calls[name] = partial(_dropout, module)
        try:
            with self:
                output, _ = run_on_meta(self._model, example, calls)
        except _Refused as ended:
            return dict.fromkeys(ended.names, ended.why)
        except Exception as error:
            names = self._last or [name for name, role in self.roles.items() if role == COLUMN]
            if not names:
                raise
            return dict.fromkeys(names, one_line(error))
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
                raise _Refused(sources, f"{name} takes its features and cannot be a row: {one_line(sharding)}")
            self.reasons[name] = one_line(sharding)
            return _linear_output(x, x.shape[0], out_features).clone()
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
                f"{self._inner_ways} ranks that split them inside a pair",
            )
        self._inputs.append((x, name))
        placement = x.placement if isinstance(x, ShardedTensor) else self._parallel.whole_placement
        output = _linear_output(x, samples, out_features // self._features_ways)
        self._outputs[name].append(output)
        out = wrap(output.clone(), placement.moved(self._parallel.regions.inner, x.dim()))
        vars(out)["_sources"] = self._last = frozenset({name})
        return out

    def _row(self, name: str, x: ShardedTensor, in_features: int, out_features: int) -> Tensor:
        local, placement, sources = plain(x), x.placement, _sources(x)
        if not placement.is_standard(local.dim()) or local.shape[-1] * self._features_ways != in_features:
            raise _Refused(
                sources,
                f"{name} takes its features and needs {in_features} of them in the last dim, but gets {x!r}",
            )
        self._run_backward(local, sources)
        self._paired |= sources
        return _linear_output(local, local.shape[0] * self._inner_ways // self._samples_ways, out_features).clone()

    def _run_backward(self, x: Tensor, sources: frozenset[str]) -> None:
        """Run backward from ``x``, a rank's part of a row's input, to the outputs of its columns."""
        if self._runs_backward or not x.requires_grad:  # checkpointed code runs its forward again here
            return
        columns = [output for name in sources for output in self._outputs[name]]
        self._runs_backward = True
        try:
            torch.autograd.grad(x, columns, _on_meta(x.shape, x.dtype), retain_graph=True, allow_unused=True)
        except Exception as error:
            raise _Refused(sources, f"in backward, {one_line(error)}") from error
        finally:
            self._runs_backward = False

    # -- the code between columns and rows ----------------------------------------------------------------

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
            raise _Refused(sources, one_line(error)) from error
        for leaf in tree_leaves(out):
            if isinstance(leaf, ShardedTensor):
                vars(leaf)["_sources"] = sources
        return out


def _linear_output(x: Tensor, samples: int, features: int) -> Tensor:
    """Return the output of a linear for ``samples`` samples of ``x``, as a leaf, which code may not write to."""
    return _on_meta((samples, *x.shape[1:-1], features), x.dtype).requires_grad_()


def _on_meta(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return a tensor on meta; a `ForwardFlow` would give it values, on which code may branch."""
    with _disable_current_modes():
        return torch.empty(shape, dtype=dtype, device="meta")


def _sources(x: Any) -> frozenset[str]:
    """Return the columns from which a tensor's split features come."""
    sources: frozenset[str] = vars(x).get("_sources", _NONE) if isinstance(x, ShardedTensor) else _NONE
    return sources


def _dropout(module: nn.Dropout, x: Tensor) -> Tensor:
    """Return dropout's output: the input, where features are split, since `colossus.layers.Dropout` takes any part."""
    return x if _sources(x) else nn.functional.dropout(x, module.p, module.training)


def one_line(error: Exception | list[IndivisibleSize]) -> str:
    """Return an error in one line, with the place in the model, and without its remedies."""
    if isinstance(error, list):
        return "; ".join(map(str, error))
    what, _, place = str(error).partition("\n")
    what = re.sub(r" \([a-z](?:[^()]|\([^()]*\))*\)", "", what.partition(". Its input is")[0])
    return " ".join(filter(None, (what, place.partition("\n")[0])))
