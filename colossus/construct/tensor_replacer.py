"""Wherever a model holds tensors: its parameters and buffers, and whatever its modules' attributes lead to."""

from __future__ import annotations

import functools
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from colossus.layout.parameter import made_by_layer, spec_of

#: packages whose objects hold no tensors of a user's; of torch, distributions and modules do
_CLOSED = ("torch", "colossus", "numpy", "logging", "threading")
#: what most containers hold, left at once; and proxies, which raise when what they stand for is gone
_PLAIN = {type(None), str, int, float, bool, *weakref.ProxyTypes}
_OF_MODULES = ("_parameters", "_buffers", "_modules")


class TensorReplacer:
    """Replaces every tensor of a model by ``replace`` of it: once for each tensor, so that tied ones stay tied.

    Registered ones come first, and what the initializers of our layers' parameters hold. Then those that attributes of
    the modules lead to, through lists, dicts, tuples, objects (dataclasses, distributions), what functions have closed
    over, and modules that are not registered. All but tuples change in place: others may refer to them.

    Args:
        replace: takes a tensor, the name of the module that holds it first, and its name there.
        dropped: by id, tensors that are left as they are where attributes still refer to them.
    """

    def __init__(
        self, replace: Callable[[Tensor, str, str], Tensor], dropped: Mapping[int, Tensor] | None = None
    ) -> None:
        self._replace = replace
        self._dropped = dropped or {}
        self._replacements: dict[int, Tensor] = {}
        #: by id, what was looked into; kept, so that no other object gets its id
        self._seen: dict[int, Any] = {}
        #: to be looked into, with the name of each
        self._found: deque[tuple[Any, str, str]] = deque()

    def run(self, model: nn.Module) -> None:
        modules = list(model.named_modules())
        self._seen.update((id(module), module) for _, module in modules)
        for of_layer in (False, True):
            for path, module in modules:
                for held in (module._parameters, module._buffers):
                    for leaf, tensor in list(held.items()):
                        if tensor is not None and made_by_layer(tensor) is of_layer:
                            self._look_into_initializers(tensor, path, leaf)
                            held[leaf] = self._replacement(tensor, path, leaf)
        for path, module in modules:  # RNNs, for one, keep a list of their parameters
            attributes = vars(module)
            if not stays_on_meta(module):
                for leaf in [leaf for leaf in attributes if leaf not in _OF_MODULES]:
                    self._update(attributes, leaf, path, leaf)
                    self._follow()

    def _look_into_initializers(self, tensor: Tensor, path: str, leaf: str) -> None:
        """What draws a parameter of a layer may hold tensors: values that exist, of which it takes a shard."""
        for shard in spec_of(tensor).shards if made_by_layer(tensor) else ():
            self._found.append((shard.init, path, f"{leaf}.init"))
        self._follow()

    def _follow(self) -> None:
        """Look into what was found, and into what that leads to. Not by recursion: graphs of objects may be deep."""
        while self._found:
            value, path, leaf = self._found.popleft()
            for holder, key, name in list(_places_in(value)):
                self._update(holder, key, path, f"{leaf}.{name}")

    def _update(self, holder: Any, key: Any, path: str, leaf: str) -> None:
        """``holder[key]`` with its tensors replaced; written only where it is another object then."""
        old = holder[key]
        new = self._replace_in(old, path, leaf)
        if new is not old:
            plain = next((kind for kind in (dict, list) if isinstance(holder, kind)), type(holder))
            plain.__setitem__(holder, key, new)

    def _replace_in(self, value: Any, path: str, leaf: str) -> Any:
        if type(value) in _PLAIN:
            return value
        if isinstance(value, Tensor):
            stays = not value.is_meta or id(value) in self._dropped
            return value if stays else self._replacement(value, path, leaf)
        if isinstance(value, tuple):
            items = [self._replace_in(item, path, f"{leaf}.{index}") for index, item in enumerate(value)]
            same = all(new is old for new, old in zip(items, value, strict=True))
            return value if same else _tuple_like(value, items)
        if id(value) not in self._seen and _may_hold_tensors(value):
            self._seen[id(value)] = value
            self._found.append((value, path, leaf))
        return value

    def _replacement(self, tensor: Tensor, path: str, leaf: str) -> Tensor:
        if id(tensor) not in self._replacements:
            self._seen[id(tensor)] = tensor
            if isinstance(tensor, UninitializedParameter | UninitializedBuffer):
                name = ".".join(filter(None, (path, leaf)))
                raise ValueError(f"{name} gets its shape at the first forward pass (a lazy module): give it its sizes")
            self._replacements[id(tensor)] = self._replace(tensor, path, leaf)
        return self._replacements[id(tensor)]


def keep_attributes_on_meta(module: nn.Module) -> None:
    """For ``prepare``: tensors that this module holds as plain attributes are not materialised."""
    vars(module)["_colossus_on_meta"] = True


def stays_on_meta(module: nn.Module) -> bool:
    return "_colossus_on_meta" in vars(module)


def _may_hold_tensors(value: Any) -> bool:
    if isinstance(value, str | bytes | int | float | type | ModuleType):
        return False
    kind = str(type(value).__module__)
    is_closed = kind.partition(".")[0] in _CLOSED and not kind.startswith("torch.distributions")
    return not is_closed or isinstance(value, nn.Module | dict | list)


def _tuple_like(value: tuple[Any, ...], items: list[Any]) -> Any:
    """A tuple of the same kind; namedtuples may take other arguments, and torch's are made by a call only."""
    return type(value)(items) if hasattr(value, "n_sequence_fields") else tuple.__new__(type(value), items)


def _places_in(value: Any) -> Iterator[tuple[Any, Any, str]]:
    """(holder, key, name) of what an object leads to at once, so that ``holder[key]`` is it."""
    if isinstance(value, dict):
        yield from ((value, key, str(key)) for key in value)
    elif isinstance(value, list | deque):
        yield from ((value, index, str(index)) for index in range(len(value)))
    elif isinstance(value, functools.partial):
        yield _Partial(value), "args", "args"
        yield from ((value.keywords, key, key) for key in value.keywords)
    elif isinstance(value, MethodType):
        yield [value.__self__], 0, "__self__"
    elif isinstance(value, FunctionType):
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            if _is_filled(cell):
                yield _Attributes(cell), "cell_contents", name
        for name in ("__defaults__", "__kwdefaults__"):
            yield _Attributes(value), name, name
    for holder in (getattr(value, "__dict__", None), _Attributes(value)):
        keys = holder if isinstance(holder, dict) else _slots(value) if holder is not None else ()
        yield from ((holder, key, str(key)) for key in keys)


def _is_filled(cell: CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def _slots(value: Any) -> Iterator[str]:
    for kind in type(value).__mro__:
        names = vars(kind).get("__slots__", ())
        for name in (names,) if isinstance(names, str) else names:
            if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                yield name


class _Attributes:
    """Attributes of an object as items; frozen ones, too."""

    def __init__(self, target: Any) -> None:
        self._target = target

    def __getitem__(self, name: str) -> Any:
        return getattr(self._target, name)

    def __setitem__(self, name: str, value: Any) -> None:
        object.__setattr__(self._target, name, value)


class _Partial(_Attributes):
    """The arguments of a `functools.partial`, which are read-only but by its state."""

    def __setitem__(self, name: str, value: Any) -> None:
        func, _, keywords, attributes = self._target.__reduce__()[2]
        self._target.__setstate__((func, value, keywords, attributes))
