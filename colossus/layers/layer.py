"""The base of the layers, and calls of the modules inside them, which may be a user's."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, cached_property, partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from colossus.construct import allocate
from colossus.construct.build_model import NamedModule
from colossus.context.groups import AxisGroup
from colossus.context.parallel_context import ParallelContext, current_context
from colossus.context.program import Subject
from colossus.error_place import located_error
from colossus.layers.checkpointing import is_checkpointed
from colossus.layers.model_parallel import ModelParallel, model_parallel_of
from colossus.layout.activation import Activation, gradient_axes
from colossus.layout.layout import Layout
from colossus.layout.parameter import Initializer, LogicalShard, ParameterSpec, attach, local_rows, spec_of
from colossus.sharded_tensor.regions import moved, to_whole
from colossus.sharded_tensor.tensor import ShardedTensor
from colossus.tensor_parallel.choose_sharding import unsharded
from colossus.tensor_parallel.mode import MatmulSharding


class Layer(NamedModule):
    """Base of the layers.

    Attributes:
        is_fused: the layer returns several outputs, as a tuple.
        takes_plain_parameters: its own parameters may be plain ones, as in a copy of the model for one process.
        is_reproducible: its values and gradients have the same bits under any number of tensor ranks (1D), if
            ``train.reproducible`` is set.
    """

    is_fused: bool = False
    takes_plain_parameters: bool = False
    is_reproducible: ClassVar[bool] = False

    def __init__(self) -> None:
        super().__init__()
        self.parallel = model_parallel_of(current_context())
        if self.context.options.reproducible and self.parallel.shardings is not None and not self.is_reproducible:
            raise located_error(
                f"train.reproducible = 'plan': {type(self).__name__} does not compute the same bits under every number "
                f"of tensor ranks: use parallel.tensor = 1"
            )
        self._seen: set[Activation] = set()  # layouts of inputs that have been checked and recorded

    def __deepcopy__(self, memo: dict[int, Any]) -> Layer:
        """Return a copy whose parameters keep their specs, which torch's copy of a parameter would drop."""
        copied = self.__class__.__new__(self.__class__)
        memo[id(self)] = copied
        copied.__dict__.update(copy.deepcopy(self.__dict__, memo))
        for name, parameter in self._parameters.items():
            other = copied._parameters[name]
            if parameter is not None and other is not None:
                attach(other, spec_of(parameter))
        return copied

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without the move plans, which contain process groups and are made anew when needed."""
        return {name: {} if name == "_move_plans" else value for name, value in vars(self).items()}

    @property
    def context(self) -> ParallelContext:
        return self.parallel.context

    def make_parameter(
        self,
        shapes: Mapping[str, Sequence[int]],
        layout: Layout,
        init: Mapping[str, Initializer] | Initializer,
        *,
        dtype: torch.dtype | None = None,
    ) -> nn.Parameter:
        """Return a parameter with the rank's shards of one or more logical parameters, concatenated along dim 0.

        Args:
            shapes: name -> full shape of each logical parameter; a parameter that is not fused has one, named "".
            init: draws the initial values, one for all or by name.
        """
        sizes = self.parallel.sizes
        full = [tuple(map(operator.index, shape)) for shape in shapes.values()]  # numpy's integers overflow
        rows = local_rows(full, layout, sizes)
        shards = tuple(
            LogicalShard(name, shape, init[name] if isinstance(init, Mapping) else init, span)
            for name, shape, span in zip(shapes, full, rows, strict=True)
        )
        local = (rows[-1][1], *layout.chunk(full[0], sizes)[1:])
        shape = full if len(full) > 1 else full[0]
        spec = ParameterSpec(shards, layout, f"{type(self).__name__} parameter of shape {shape}")
        return attach(nn.Parameter(allocate.allocate(local, spec, self.context, dtype)), spec)

    def decide_gradients(self, parameter: nn.Parameter | None, *uses: Activation) -> None:
        """Record, before any use, the layouts of activations that a parameter meets: its gradient sums over them."""
        if parameter is not None:
            spec = spec_of(parameter)
            spec.record(gradient_axes(spec.layout, *uses))
            spec.is_decided = True

    def choose_sharding(
        self, split: str | None, in_features: int, outputs: Mapping[str, int], *, padded: bool = False
    ) -> MatmulSharding | None:
        """Return the sharding of a weight, by its sizes and counted bytes; None without tensor parallelism.

        Args:
            split, outputs, padded: see `colossus.tensor_parallel.choose_sharding.Shardings.choose`. Outside a pair, a
                weight whose sizes do not divide is not split.

        Raises:
            ValueError: the sizes of a pair do not divide.
        """
        shardings = self.parallel.shardings
        if shardings is None:
            return None
        chosen = shardings.choose(split, in_features, outputs, padded=padded)
        if isinstance(chosen, MatmulSharding):
            return chosen
        if split is None:
            return unsharded(shardings.regions)
        raise located_error(
            f"{type(self).__name__} of {in_features} to {dict(outputs)} features under parallel.tensor.mode = "
            f"{self.parallel.mode.name}: {'; '.join(map(str, chosen))}"
        )

    def split_between_blocks(self, num_features: int) -> Activation:
        """Return the whole layout with features split as between blocks, or whole if they do not divide.

        A table with a row for each id, position or class meets this activation: its rows are whole, its columns split
        alike.
        """
        features = self.parallel.regions.residual.features
        if features and num_features % self.context.size(features):
            features = ()
        return replace(self.parallel.regions.whole, features=features)

    def check_stored(self, weight: nn.Parameter, layout: Layout) -> None:
        """Raise ValueError unless a weight has the layout that this layer expects; one tied by assignment may not."""
        spec = spec_of(weight)
        if spec.layout != layout:
            raise located_error(
                f"{self.title}: its weight is stored as {spec.layout}, but this layer stores it as {layout}. A weight "
                f"that several layers share must be made by one: LMHead(hidden_size, vocab_size, tied_to=embedding) "
                f"ties a head to an embedding in every mode"
            )

    def require_batch(self, x: Tensor) -> None:
        """Raise ValueError unless x has the dim that ranks may split: [batch, features], or ids [batch], at least."""
        if x.dim() < 1 + x.is_floating_point():
            raise located_error(f"{self.title}: x has shape {tuple(x.shape)}, without a batch: x.unsqueeze(0)")

    def record_uses(self, activation: Activation) -> None:
        """Record that this layer's own parameters meet an activation of this layout, element by element."""
        if activation not in self._seen:
            for parameter in self.parameters(recurse=False):
                spec = spec_of(parameter)
                spec.record(gradient_axes(spec.layout, activation))
            self._seen.add(activation)

    def record_use_between_blocks(self, x: Tensor, activation: Activation, features: tuple[str, ...]) -> None:
        """Record a use of a local x in the layout ``activation`` with a parameter split over ``features``, or whole.

        Raises:
            ValueError: x is inside a column/row pair, where features are split otherwise.
        """
        if activation.features not in ((), features):
            raise located_error(
                f"{self.title}: features are split over {','.join(activation.features)} (local shape "
                f"{tuple(x.shape)}), inside a column/row pair: put the layer before the pair, or behind it"
            )
        self.record_uses(activation)

    def name_error(self, error: Exception, x: Tensor, source: Activation, in_features: int) -> None:
        """Add this layer's name to an error of the product of a plain local x in the layout ``source``.

        Raises:
            ValueError: instead of the error, if x cannot be multiplied.
        """
        features = x.shape[-1] * (self.context.size(source.features) if source.features else 1)
        of_input = f"given {tuple(x.shape)} on this rank"
        if features != in_features:
            raise ValueError(f"{self.title}: it takes {in_features} features, but its input has {features}") from error
        if isinstance(error, ValueError):
            raise ValueError(
                f"{self.title}, {of_input}: {error}. Samples travel between the ranks of this tensor mode: pass a "
                f"number of them that divides (for one row that all samples share: x.expand(n, ..), and one row of "
                f"the result), or use split=None"
            ) from error
        error.add_note(f"in {self.title}, {of_input}")

    def note_collectives(self, group: AxisGroup) -> None:
        """Record in a group that its next collectives belong to this layer."""
        if not torch.compiler.is_compiling():
            group.program.note(self._subject)

    @cached_property
    def _subject(self) -> Subject:
        parameter = next(self.parameters(recurse=False), None)
        return Subject([self.title]) if parameter is None else spec_of(parameter).subject

    @property
    def title(self) -> str:
        """The name of this layer in errors."""
        return f"{self.full_name} ({type(self).__name__})" if self.full_name else type(self).__name__


_CALL = nn.Module.__call__
_PACKAGE = __name__.partition(".")[0] + "."


def is_ours(module: nn.Module) -> bool:
    """Return whether ``module`` is a layer of ours whose ``forward`` is neither overridden nor replaced.

    Such a layer takes split tensors; any other module needs whole ones.
    """
    if not isinstance(module, Layer) or ("forward" in module.__dict__ and not is_checkpointed(module)):
        return False
    kind = type(module)
    return _is_of_package(kind.forward) and kind.__call__ is _CALL


@cache
def _is_of_package(function: Callable[..., Any]) -> bool:
    return function.__module__.startswith(_PACKAGE)


def call(
    child: nn.Module,
    x: Tensor,
    parallel: ModelParallel,
    target: Activation | None = None,
    *,
    outputs: int | None = None,
    **more: Any,
) -> Any:
    """Return ``child(x)``; a module of a user's gets x in the whole layout, and its result is moved back.

    Args:
        target: the layout of the result; by default the layout to which x comes back.
        outputs: the number of outputs of a fused linear, as a tuple; None for one tensor.
        more: keyword arguments of the child; a user's module gets those that are not None.

    Raises:
        ValueError: the child returns something else than these tensors.
    """
    if is_ours(child):
        out = child(x, **more)
        if target is None and outputs is None:
            return out
    else:
        out = child(to_whole(x), **{key: value for key, value in more.items() if value is not None})
    return_layout = x.placement.return_layout if isinstance(x, ShardedTensor) else parallel.regions.whole

    back = partial(moved, target=target or return_layout, parallel=parallel, return_layout=return_layout)
    if outputs is None and isinstance(out, Tensor):
        return back(out)
    if outputs is not None and isinstance(out, tuple | list) and len(out) == outputs:
        return tuple(map(back, out))
    shape = f" of shape {tuple(out.shape)}" if isinstance(out, Tensor) else ""
    wanted = f"{outputs} tensors, as the fused Linear that it replaces does" if outputs else "one tensor"
    raise located_error(f"a {type(child).__name__} returned a {type(out).__name__}{shape}; it must return {wanted}")
