"""Building a model on the meta device, and giving every parameter its values afterwards.

While a model is built under `Recorder`, nothing is allocated: tensors are made on the meta device and what the
constructor does to them is recorded by storage. Afterwards the values of a plain parameter or buffer come from
replaying the operations that lead to it, under a generator seeded by the run's seed and its full name: whatever a
user wrote in ``__init__`` holds, and does not depend on the plan or on the order of construction. Parameters of our
own layers are drawn from their specs. (The idea of deferred init is that of torchdistX.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from colossus.context.parallel_context import ParallelContext
from colossus.context.rng import hash_key
from colossus.layout.parameter import ParameterSpec

_aten = torch.ops.aten


class Recorder(TorchDispatchMode):
    """Makes every new tensor a meta tensor and records the operations on it."""

    def __init__(self) -> None:
        super().__init__()
        self._operations: list[_Operation] = []
        self._by_storage: dict[int, list[int]] = {}
        self._sharded: dict[int, ParameterSpec] = {}
        self._keep: list[Any] = []

    def protect(self, buffer: Tensor, spec: ParameterSpec) -> None:
        """Operations that write to this buffer raise: its values come from its spec."""
        self._sharded[_key(buffer)] = spec
        self._keep.append(buffer)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        inputs = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, Tensor)]
        meta_inputs = [leaf for leaf in inputs if leaf.is_meta]
        if func is _aten._local_scalar_dense.default and meta_inputs:
            return self.value(meta_inputs[0]).item()
        if func is _aten._to_copy.default and meta_inputs and _leaves_meta(kwargs):
            return func(self.value(meta_inputs[0]), *args[1:], **kwargs)
        makes_tensor = any(argument.name == "device" for argument in func._schema.arguments)
        if not meta_inputs and not (makes_tensor and not inputs):
            return func(*args, **kwargs)
        written = [leaf for leaf in _written(func, args, kwargs) if _key(leaf) in self._sharded]
        if written:
            spec = self._sharded[_key(written[0])]
            raise ValueError(
                f"{func.overloadpacket.__name__} writes to a {spec.description} while the model is built, but a "
                f"sharded parameter draws its initial value from its name and full shape: pass init=... to the "
                f"layer (see colossus.layers.init) instead of using torch.nn.init on it"
            )
        meta_kwargs = {**kwargs, "device": torch.device("meta")} if makes_tensor else kwargs
        meta_args, meta_kwargs = tree_map(_as_meta, (args, meta_kwargs))
        meta_kwargs.pop("generator", None)
        out = func(*meta_args, **meta_kwargs)
        self._note(func, args, kwargs, out)
        return out

    def _note(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        outputs = [leaf for leaf in tree_flatten(out)[0] if isinstance(leaf, Tensor)]
        inputs = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, Tensor) and leaf.is_meta]
        writes = {_key(leaf) for leaf in (*outputs, *_written(func, args, kwargs))}
        operation = _Operation(func, args, kwargs, outputs, {_key(leaf) for leaf in inputs}, writes)
        index = len(self._operations)
        self._operations.append(operation)
        for key in writes:
            self._by_storage.setdefault(key, []).append(index)

    def value(self, tensor: Tensor, seed: int | None = None) -> Tensor:
        """The real value of a recorded meta tensor, by replaying what leads to it.

        Args:
            seed: of torch's generator during the replay; None leaves the generator as it is.
        """
        needed: set[int] = set()
        todo, seen = [_key(tensor)], set()
        while todo:
            key = todo.pop()
            if key in seen:
                continue
            seen.add(key)
            for index in self._by_storage.get(key, ()):
                if index not in needed:
                    needed.add(index)
                    todo.extend(self._operations[index].reads)
        storages: dict[int, torch.UntypedStorage] = {}
        with torch.utils._python_dispatch._disable_current_modes(), torch.random.fork_rng(devices=[]), torch.no_grad():
            if seed is not None:
                torch.manual_seed(seed)
            for index in sorted(needed):
                self._operations[index].replay(storages)
            if _key(tensor) not in storages:
                raise ValueError(
                    "a tensor made while the model was built has no recorded value (made on the meta device by hand?)"
                )
            return _lower(tensor, storages)


class _Operation:
    def __init__(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        outputs: list[Tensor],
        reads: set[int],
        writes: set[int],
    ) -> None:
        self.func, self.args, self.kwargs = func, args, kwargs
        self.outputs, self.reads, self.writes = outputs, reads, writes

    def replay(self, storages: dict[int, torch.UntypedStorage]) -> None:
        def lower(leaf: Any) -> Any:
            return _lower(leaf, storages) if isinstance(leaf, Tensor) and leaf.is_meta else leaf

        args, kwargs = tree_map(lower, (self.args, self.kwargs))
        out = self.func(*args, **kwargs)
        results = [leaf for leaf in tree_flatten(out)[0] if isinstance(leaf, Tensor)]
        for meta, real in zip(self.outputs, results, strict=True):
            storages.setdefault(_key(meta), real.untyped_storage())


def _lower(meta: Tensor, storages: dict[int, torch.UntypedStorage]) -> Tensor:
    real = torch.empty(0, dtype=meta.dtype)
    return real.set_(storages[_key(meta)], meta.storage_offset(), meta.size(), meta.stride())  # type: ignore[call-overload]


def _key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _as_meta(leaf: Any) -> Any:
    return leaf.to("meta") if isinstance(leaf, Tensor) and not leaf.is_meta and leaf.dim() > 0 else leaf


def _leaves_meta(kwargs: dict[str, Any]) -> bool:
    device = kwargs.get("device")
    return device is not None and torch.device(device).type != "meta"


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterable[Tensor]:
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            if isinstance(value, Tensor) and value.is_meta:
                yield value


_recorders: list[Recorder] = []


def record(factory: Callable[[], Any]) -> tuple[Any, Recorder]:
    """Run ``factory`` under a recorder."""
    recorder = Recorder()
    _recorders.append(recorder)
    try:
        with recorder:
            return factory(), recorder
    finally:
        _recorders.pop()


def allocate(
    shape: tuple[int, ...], spec: ParameterSpec, context: ParallelContext, dtype: torch.dtype | None
) -> Tensor:
    """The buffer of a layer's parameter: on meta while a model is built, else drawn at once.

    Raises:
        ValueError: for a parameter that is split over ranks outside of a build: it has no name to draw from.
    """
    if _recorders:
        with torch.utils._python_dispatch._disable_current_modes():
            buffer = torch.empty(shape, dtype=dtype, device="meta")
        _recorders[-1].protect(buffer, spec)
        return buffer
    if context.world_size > 1:
        raise ValueError(
            f"a {spec.description} is made outside of a build, where it has no name to draw its values from: pass "
            f"the model as a class or function to colossus.initialize(model=...) or colossus.build(...)"
        )
    key = int(torch.randint(2**62, ()).item())
    return draw(spec, shape, context, key_of=lambda part: hash_key(key, part), dtype=dtype, device=context.device)


def draw(
    spec: ParameterSpec,
    shape: tuple[int, ...],
    context: ParallelContext,
    *,
    key_of: Callable[[str], int],
    dtype: torch.dtype | None,
    device: torch.device,
) -> Tensor:
    """The rank's buffer of a spec: every piece drawn by its own key, zeros where a box is uneven."""
    dtype = dtype or torch.get_default_dtype()
    out = torch.zeros(shape, dtype=dtype)
    for piece in spec.pieces:
        box = piece.layout.box(piece.shape, context.grid.sizes, context.coordinates)
        value = torch.from_numpy(piece.init(key_of(piece.part), piece.shape, box))
        part = out[piece.rows[0] : piece.rows[1]]
        part[tuple(slice(0, size) for size in value.shape)] = value.to(dtype)
    return out.to(device)
