"""Where a model holds tensors: its parameters and buffers, and the attributes of its modules."""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from colossus.layout.parameter import made_by_layer, spec_of

_OF_MODULES = ("_parameters", "_buffers", "_modules")


class TensorReplacer:
    """Replaces every tensor of a model by ``replace`` of it: once for each tensor, so that tied ones stay tied.

    Registered ones come first, and what the initializers of our layers' parameters hold. Then those that are attributes
    of modules themselves, or in lists, tuples and dicts there (RNNs, for one, keep a list of their parameters). Lists
    and dicts change in place: others may refer to them. What lies elsewhere (in objects of other classes, in functions)
    stays on the meta device; see `InitTrace.require_nothing_hidden`.

    Args:
        replace: takes a tensor, the name of the module that holds it first, and its name there.
        dropped: ids of tensors that are left as they are where attributes still refer to them.
    """

    def __init__(self, replace: Callable[[Tensor, str, str], Tensor], dropped: Container[int] = ()) -> None:
        self._replace, self._dropped = replace, dropped
        #: by id, with the tensor itself, so that no other object gets its id
        self._replacements: dict[int, tuple[Tensor, Tensor]] = {}
        self._seen: dict[int, Any] = {}

    def run(self, model: nn.Module) -> None:
        modules = list(model.named_modules())
        for path, module in modules:
            for held in (module._parameters, module._buffers):
                for leaf, tensor in list(held.items()):
                    if tensor is not None:
                        self._look_into_initializers(tensor, path, leaf)
                        held[leaf] = self._replacement(tensor, path, leaf)
        for path, module in modules:
            if "_colossus_on_meta" not in vars(module):
                attributes = vars(module)
                for leaf in [leaf for leaf in attributes if leaf not in _OF_MODULES]:
                    attributes[leaf] = self._within(attributes[leaf], path, leaf)

    def _look_into_initializers(self, tensor: Tensor, path: str, leaf: str) -> None:
        """What draws a parameter of a layer may hold tensors: values that exist, of which it takes a shard."""
        todo = [shard.init for shard in spec_of(tensor).shards] if made_by_layer(tensor) else []
        while todo:
            init = todo.pop()
            for name, value in getattr(init, "__dict__", {}).items():
                if isinstance(value, Tensor):
                    object.__setattr__(init, name, self._within(value, path, f"{leaf}.init.{name}"))
                elif callable(value):
                    todo.append(value)

    def _within(self, value: Any, path: str, leaf: str) -> Any:
        """A value with its tensors replaced."""
        if isinstance(value, Tensor):
            stays = not value.is_meta or id(value) in self._dropped
            return value if stays else self._replacement(value, path, leaf)
        if isinstance(value, list | dict) and id(value) not in self._seen:
            self._seen[id(value)] = value
            for key in range(len(value)) if isinstance(value, list) else list(value):
                value[key] = self._within(value[key], path, f"{leaf}.{key}")
        if isinstance(value, tuple):
            items = [self._within(item, path, f"{leaf}.{index}") for index, item in enumerate(value)]
            if any(new is not old for new, old in zip(items, value, strict=True)):
                return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
        return value

    def _replacement(self, tensor: Tensor, path: str, leaf: str) -> Tensor:
        if id(tensor) not in self._replacements:
            if isinstance(tensor, UninitializedParameter | UninitializedBuffer):
                name = ".".join(filter(None, (path, leaf)))
                raise ValueError(f"{name} gets its shape at the first forward pass (a lazy module): give it its sizes")
            self._replacements[id(tensor)] = tensor, self._replace(tensor, path, leaf)
        return self._replacements[id(tensor)][1]


def keep_attributes_on_meta(module: nn.Module) -> None:
    """For ``prepare``: tensors that this module holds as plain attributes are not materialised."""
    vars(module)["_colossus_on_meta"] = True
