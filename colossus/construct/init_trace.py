"""Deferred initialisation: record the operations of a constructor on its tensors, and run them later (as torchdistX).

While a model is built under `InitTrace`, nothing is allocated. Tensors are made on the meta device, and operations on
them are recorded by the storages that they read or write. A value is computed afterwards by running the operations
connected with its storage, each once and in the recorded order: copies, views, and weights computed from other weights
have the values of plain torch.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from colossus import torch_versions
from colossus.error_place import located_error
from colossus.layout.operators import OperatorMode
from colossus.layout.parameter import ParameterSpec
from colossus.random import GlobalRng, hash_key

_aten = torch.ops.aten
_TORCH_RNG = GlobalRng(torch_only=True)
CPU, META = torch.device("cpu"), torch.device("meta")
_TORCHS = torch.default_generator


class _RecordedOp:
    """One operation with its arguments and results at the time of recording."""

    def __init__(self, func: Any, args: Any, kwargs: Any, index: int) -> None:
        self.func, self.index, self.has_run = func, index, False
        self.args, self.kwargs = tree_map(_snapshot, (args, kwargs))
        self.outputs: list[Tensor] = []

    def storages(self) -> list[torch.UntypedStorage]:
        """Return the storages of all its tensors, which connect it with other operations."""
        leaves = tree_leaves((self.args, self.kwargs, self.outputs))
        return [leaf.untyped_storage() for leaf in leaves if isinstance(leaf, Tensor)]


class InitTrace(OperatorMode):
    """A mode that makes every new tensor a meta tensor and records the operations on it.

    Where the constructor needs a value at once (``.item()``, a shape that depends on values, a copy to a device, a draw
    from a generator of its own), the operations behind that value run immediately.

    Args:
        seed: seed of random numbers whose values are needed at once (``torch.rand(()).item()``).
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed = seed
        self._num_seeds_drawn = self._num_ops = 0
        #: key of a storage -> its operations
        self._ops_by_key: dict[int, list[_RecordedOp]] = {}
        self._values: dict[int, torch.UntypedStorage] = {}
        self._seeds: dict[int, int] = {}
        self._shared: set[int] = set()
        self._sharded: dict[int, ParameterSpec] = {}
        #: key of a storage with values (torch.load makes tensors of them) -> its stand-in on meta
        self._stand_ins: dict[int, torch.UntypedStorage] = {}
        #: storages stay alive, so that no later one gets the key of another
        self._alive: list[torch.UntypedStorage] = []

    def mark_sharded(self, buffer: Tensor, spec: ParameterSpec) -> None:
        """Declare that a buffer is drawn from its spec, so that operations that write to it raise."""
        with torch._C.DisableTorchFunction():
            self._sharded[_key(buffer)] = spec
            self._alive.append(buffer.untyped_storage())

    def is_sharded(self, buffer: Tensor) -> bool:
        return _key(buffer) in self._sharded

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with torch._C.DisableTorchFunction():
            return self._record_or_run(func, args, kwargs or {})

    def _record_or_run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        leaves = tree_leaves((args, kwargs))
        inputs = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        has_generator = any(isinstance(leaf, torch.Generator) and leaf is not _TORCHS for leaf in leaves)
        has_meta = any(leaf.is_meta for leaf in inputs)
        makes_tensor = any(argument.name == "device" for argument in func._schema.arguments)
        written = list(tensors_written(func, args, kwargs))
        for leaf in written:
            if self.is_sharded(leaf):
                raise located_error(_write_refusal(func, self._sharded[_key(leaf)]))
        only_real = not has_meta and not (makes_tensor and not inputs)
        needs_values = has_generator or (has_meta and _needs_values(func, args, kwargs))
        if only_real or needs_values or not all(leaf.is_meta for leaf in written):
            return self._run_now(func, args, kwargs, written)
        meta_args, meta_kwargs = tree_map(self._as_meta, (args, kwargs))
        if makes_tensor:
            meta_kwargs["device"] = META
        if "generator" in meta_kwargs:
            meta_kwargs["generator"] = None
        op = _RecordedOp(func, args, kwargs, self._num_ops)
        try:
            # an in-place operation needs no meta kernel; some of torch's import torch._dynamo
            out = args[0] if _keeps_its_shape(func, inputs) else func(*meta_args, **meta_kwargs)
        except NotImplementedError:  # an operation that the meta device does not know
            return self._run_now(func, args, kwargs, written)
        op.outputs = [_snapshot(leaf) for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        self._num_ops += 1
        for storage in op.storages():
            self._alive.append(storage)
            self._ops_by_key.setdefault(storage._cdata, []).append(op)
        if func is _aten._to_copy.default and self.is_sharded(args[0]):
            self.mark_sharded(out, self._sharded[_key(args[0])])
        return out

    def _as_meta(self, leaf: Any) -> Any:
        if isinstance(leaf, torch.UntypedStorage) and leaf.device != META:
            self._alive.append(leaf)
            return self._stand_ins.setdefault(leaf._cdata, torch.UntypedStorage(leaf.nbytes(), device=META))
        return leaf.to("meta") if isinstance(leaf, Tensor) and not leaf.is_meta and leaf.dim() > 0 else leaf

    def _run_now(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], written: list[Tensor]) -> Any:
        args, kwargs = tree_map(self._read_now, (args, kwargs))
        for leaf in written:  # recorded operations that read the old value must run before it is overwritten
            self._run_connected(_key(leaf))
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        self._num_seeds_drawn += 1
        with _TORCH_RNG.preserved(hash_key(self.seed, self._num_seeds_drawn)):
            return func(*args, **kwargs)

    def _read_now(self, leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return self.value(leaf)
        return CPU if isinstance(leaf, torch.device) and leaf == META else leaf

    # -- values -------------------------------------------------------------------------------------------

    def fix_seed(self, tensor: Tensor, seed: int) -> None:
        """Fix the seed under which the operations connected with a recorded meta tensor run, unless it is fixed.

        Values then do not depend on which tensors are computed.
        """
        if _key(tensor) not in self._seeds:
            _, connected = self._connected(_key(tensor))
            self._seeds.update(dict.fromkeys(connected, seed))

    def value(self, tensor: Tensor) -> Tensor:
        """Return the real value of a recorded meta tensor, sharing memory with the same tensors as when recorded.

        A tensor with values is returned itself, after the recorded operations on its memory have run.
        """
        if tensor.is_meta:
            self._run_connected(_key(tensor))
        elif self._stand_ins and torch._C._has_storage(tensor) and _key(tensor) in self._stand_ins:
            self._run_connected(self._stand_ins[_key(tensor)]._cdata)
        with _disable_current_modes(), torch.no_grad():
            return self._to_real(tensor)

    def beside(self, tensor: Tensor, other: Tensor) -> Tensor:
        """Return ``other`` on the device of ``tensor``, meta or not, in its own memory: for ``tensor.data = other``."""
        if tensor.is_meta == other.is_meta:
            return other
        if other.is_meta:
            real = self.value(other)
            self._stand_ins[_key(real)] = other.untyped_storage()
            self._alive += [real.untyped_storage(), other.untyped_storage()]
            return real
        with _disable_current_modes():
            storage = self._as_meta(other.untyped_storage())
            self._values[storage._cdata] = other.untyped_storage()
            out = torch.empty(0, dtype=other.dtype, device=META)
            return out.set_(storage, other.storage_offset(), other.size(), other.stride())

    def keep(self, tensor: Tensor) -> None:
        """Exclude the value of a recorded meta tensor from `forget`, because other parameters share its memory."""
        self._shared.add(_key(tensor))

    def forget(self, tensor: Tensor) -> None:
        """Free the value of a recorded meta tensor that nobody needs again."""
        if _key(tensor) not in self._shared:
            self._values.pop(_key(tensor), None)

    def require_nothing_hidden(self) -> None:
        """Raise ValueError, with a shape, unless every tensor of the constructor has its values now.

        A product with a meta tensor would return arbitrary numbers. The trace cannot be used afterwards.
        """
        results = [
            (tuple(x.shape), StorageWeakRef(x.untyped_storage()))
            for ops in self._ops_by_key.values() for op in ops for x in op.outputs
        ]  # fmt: skip
        self._ops_by_key, self._alive, self._stand_ins = {}, [], {}
        if not all(ref.expired() for _, ref in results):
            gc.collect()  # only a reference cycle may hold a tensor
        for shape, ref in results:
            if not ref.expired():
                raise ValueError(
                    f"a tensor of shape {shape} from the constructor is in a place where it gets no values (an object "
                    f"that is no module, a function): make it a buffer, register_buffer(.., persistent=False), or "
                    f"an attribute of a module, also in a list or a dict"
                )

    def _run_connected(self, key: int) -> None:
        """Run all operations connected with a storage, in the recorded order, so that each reads what it read then."""
        pending, _ = self._connected(key)
        if pending:
            seed = self._seeds[key] if key in self._seeds else hash_key(self.seed, "op", min(pending))
            with _disable_current_modes(), _TORCH_RNG.preserved(seed), torch.no_grad():
                for index in sorted(pending):
                    self._run(pending[index])

    def _connected(self, key: int) -> tuple[dict[int, _RecordedOp], set[int]]:
        """Return the pending operations connected with a storage, by index, and all storages on the way to them.

        Two storages are connected when one operation touches both.
        """
        pending: dict[int, _RecordedOp] = {}
        todo, seen = [key], set[int]()
        while todo:
            key = todo.pop()
            if key in seen:
                continue
            seen.add(key)
            for op in self._ops_by_key.get(key, ()):
                if not op.has_run and op.index not in pending:
                    pending[op.index] = op
                    todo.extend(storage._cdata for storage in op.storages())
        return pending, seen

    def _run(self, op: _RecordedOp) -> None:
        args, kwargs = tree_map(self._to_real, (op.args, op.kwargs))
        results = [leaf for leaf in tree_leaves(op.func(*args, **kwargs)) if isinstance(leaf, Tensor)]
        for meta, real in zip(op.outputs, results, strict=True):
            if _key(meta) not in self._values:
                self._values[_key(meta)] = _storage_like(real, meta)
        op.has_run, op.args, op.kwargs = True, (), {}

    def _to_real(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or not leaf.is_meta:
            return CPU if isinstance(leaf, torch.device) else leaf
        if self.is_sharded(leaf):
            raise located_error(
                f"the constructor copies or computes with the values of a {self._sharded[_key(leaf)].description}, "
                f"but it has none yet: they are drawn afterwards, from its name and full shape. Make each layer by its "
                f"constructor instead of copy.deepcopy, and compute with weights after the build; parametrizations "
                f"and weight_norm, which compute with weights, need a layer of torch.nn"
            )
        if _key(leaf) not in self._values:
            raise located_error("a tensor of the constructor has no value: it was made on the meta device")
        real = torch.empty(0, dtype=leaf.dtype)
        real.set_(self._values[_key(leaf)], leaf.storage_offset(), leaf.size(), leaf.stride())
        real = real.conj() if leaf.is_conj() else real
        return real._neg_view() if leaf.is_neg() else real


def _key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _snapshot(leaf: Any) -> Any:
    """Return a tensor that later changes of the original do not reach.

    For a meta tensor it is an alias (``t_()`` and the like change the tensor itself); for memory shared with numpy,
    which numpy may change, a copy.
    """
    if not isinstance(leaf, Tensor):
        return leaf
    if leaf.is_meta:
        return leaf.detach()
    return leaf if leaf.untyped_storage().resizable() else leaf.clone()


def _storage_like(real: Tensor, meta: Tensor) -> torch.UntypedStorage:
    """Return a storage in which ``meta``, an operation's result, has the values of ``real``, with its own strides."""
    if real.stride() == meta.stride() and not real.storage_offset():
        return real.untyped_storage()
    return torch.empty_strided(meta.size(), meta.stride(), dtype=meta.dtype).copy_(real).untyped_storage()


def _needs_values(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether a result must be real: a Python number, a shape that depends on values, a copy to a device."""
    if torch.Tag.data_dependent_output in func.tags or torch.Tag.dynamic_output_shape in func.tags:
        return True
    # a parameter stays on meta: Module.to(device) in a constructor does not change the final device
    device = kwargs.get("device") if func is _aten._to_copy.default else None
    return device is not None and torch.device(device) != META and not isinstance(args[0], nn.Parameter)


def tensors_written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterable[Tensor]:
    """Yield the tensors that a call of an operator writes to."""
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            yield from (leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor))


def _keeps_its_shape(func: Any, inputs: list[Tensor]) -> bool:
    """Return whether an operator, such as ``normal_``, changes its one tensor of floats element by element."""
    elementwise = torch.Tag.pointwise in func.tags or torch.Tag.nondeterministic_seeded in func.tags
    return elementwise and torch_versions.is_inplace(func) and len(inputs) == 1 and inputs[0].is_floating_point()


def _write_refusal(func: Any, spec: ParameterSpec) -> str:
    return (
        f"{func.overloadpacket.__name__} writes to a {spec.description} while the model is built, but a sharded "
        f"parameter draws its initial value from its name and full shape: pass init=... to the layer (see "
        f"colossus.layers.init; Values(tensor) for existing values) instead of using torch.nn.init or "
        f"load_state_dict on it, or load with colossus.checkpoint.load_full_state_dict once there is an engine"
    )
