"""Deferred initialisation: record what a constructor does to its tensors, and do it later. (As torchdistX does.)

While a model is built under `InitTrace` nothing is allocated. Tensors are made on the meta device, and operations on
them are recorded by the storages that they read or write. A value is computed afterwards by running the operations
connected with its storage, each once and in the recorded order: copies, views, and weights computed from other weights
come out as in plain torch.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from colossus import torch_versions
from colossus.construct.recorded_op import RecordedOp, TensorRef, as_ref
from colossus.error_place import located_error
from colossus.layout.parameter import ParameterSpec
from colossus.random import GlobalRng, hash_key

_aten = torch.ops.aten
_TORCH_RNG = GlobalRng(torch_only=True)
_CPU, _META = torch.device("cpu"), torch.device("meta")
_TORCHS = torch.default_generator
#: operation -> what gives the same tensor on meta
_ON_META = dict.fromkeys(
    (_aten.rand.default, _aten.randn.default, _aten.rand.generator, _aten.randn.generator), _aten.empty.memory_format
)


class HideMeta(TorchFunctionMode):
    """Hides from a constructor that its tensors are on meta, where some of `torch.nn.init` would do nothing."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func == Tensor.is_meta.__get__:  # type: ignore[attr-defined]
            return False
        if func is Tensor.numpy:
            return args[0].cpu().numpy(*args[1:], **(kwargs or {}))
        return func(*args, **(kwargs or {}))


class InitTrace(TorchDispatchMode):
    """Makes every new tensor a meta tensor and records the operations on it.

    Where the constructor needs a value at once (``.item()``, a shape that depends on values, a copy to a device, a draw
    from a generator of its own), what it depends on is run there and then.

    Args:
        seed: of random numbers whose values are needed at once (``torch.rand(()).item()``).
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._seed = seed
        self._num_seeds_drawn = 0
        self._num_ops = 0
        #: by storage
        self._ops_by_key: dict[int, list[RecordedOp]] = {}
        self._storages: dict[int, torch.UntypedStorage] = {}
        self._fixed_seeds: dict[int, int] = {}
        #: by id of a storage with values, the storage, and the one that stands for it
        self._meta_storages: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
        self._sharded: dict[int, ParameterSpec] = {}
        self._alive: list[torch.UntypedStorage] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False: else torch wraps `__torch_dispatch__` and imports torch._dynamo at its first op (1.6 s a rank)."""
        return False

    def mark_sharded(self, buffer: Tensor, spec: ParameterSpec) -> None:
        """Remember that this buffer is drawn from its spec: operations that write to it raise."""
        self._sharded[_storage_id(buffer)] = spec
        self._alive.append(buffer.untyped_storage())

    def is_sharded(self, buffer: Tensor) -> bool:
        return _storage_id(buffer) in self._sharded

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with torch._C.DisableTorchFunction():
            return self._record_or_run(func, args, kwargs or {})

    def _record_or_run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        leaves = tree_leaves((args, kwargs))
        inputs = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        has_generator = any(isinstance(leaf, torch.Generator) and leaf is not _TORCHS for leaf in leaves)
        metas = [leaf for leaf in inputs if leaf.is_meta]
        makes_tensor = any(argument.name == "device" for argument in func._schema.arguments)
        written = list(_written(func, args, kwargs))
        for leaf in written:
            if _storage_id(leaf) in self._sharded:
                raise located_error(_write_refusal(func, self._sharded[_storage_id(leaf)]))
        only_real = not metas and not (makes_tensor and not inputs)
        needs_values = has_generator or (metas and _needs_values(func, args, kwargs))
        if only_real or needs_values or not all(leaf.is_meta for leaf in written):
            return self._run_now(func, args, kwargs, written)
        meta_args, meta_kwargs = tree_map(self._as_meta, (args, kwargs))
        if makes_tensor:
            meta_kwargs["device"] = _META
        if meta_kwargs.pop("generator", None) is not None and func not in _ON_META:
            meta_kwargs["generator"] = None  # some operations have no default for it
        op = RecordedOp(func, args, kwargs)
        try:
            # where there is nothing to compute, not by torch's meta kernels, some of which import torch._dynamo
            keeps = _keeps_its_shape(func, inputs, args, kwargs)
            out = args[0] if keeps else _ON_META.get(func, func)(*meta_args, **meta_kwargs)
        except NotImplementedError:  # an operation that the meta device does not know
            return self._run_now(func, args, kwargs, written)
        op.outputs = [as_ref(leaf) for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        self._append(op)
        if func is _aten._to_copy.default and self.is_sharded(args[0]):
            self.mark_sharded(out, self._sharded[_storage_id(args[0])])
        return out

    def _as_meta(self, leaf: Any) -> Any:
        if isinstance(leaf, torch.UntypedStorage) and leaf.device != _META:  # torch.load makes tensors of storages
            known = self._meta_storages.get(leaf._cdata)
            if known is None:
                known = leaf, torch.UntypedStorage(leaf.nbytes(), device=_META)
                self._meta_storages[leaf._cdata] = known
            return known[1]
        return leaf.to("meta") if isinstance(leaf, Tensor) and not leaf.is_meta and leaf.dim() > 0 else leaf

    def _run_now(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], written: list[Tensor]) -> Any:
        args, kwargs = tree_map(self._read_now, (args, kwargs))
        for leaf in written:  # recorded operations that read the old value must run before it is overwritten
            self._run_connected(_storage_id(leaf), self._next_seed())
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        with _TORCH_RNG.preserved(self._next_seed()):
            return func(*args, **kwargs)

    def _read_now(self, leaf: Any) -> Any:
        """A tensor with values in the place of one on meta; the CPU in the place of the meta device."""
        if isinstance(leaf, Tensor) and leaf.is_meta:
            return self.value(leaf, self._next_seed())
        return _CPU if isinstance(leaf, torch.device) and leaf == _META else leaf

    def _next_seed(self) -> int:
        self._num_seeds_drawn += 1
        return hash_key(self._seed, self._num_seeds_drawn)

    def _append(self, op: RecordedOp) -> None:
        op.index = self._num_ops
        self._num_ops += 1
        self._alive.extend(op.storages())
        for key in op.touched():
            self._ops_by_key.setdefault(key, []).append(op)

    def fix_seed(self, tensor: Tensor, seed: int) -> None:
        """Fix the seed under which the operations connected with a recorded meta tensor will run, unless one is fixed.

        With the seed of every tensor fixed, in an order that does not depend on the plan, values do not depend on which
        tensors are asked for.
        """
        if _storage_id(tensor) not in self._fixed_seeds:
            _, connected = self._connected(_storage_id(tensor))
            self._fixed_seeds.update(dict.fromkeys(connected, seed))

    def value(self, tensor: Tensor, seed: int) -> Tensor:
        """The real value of a recorded meta tensor; it shares the memory of whatever it shared it with when recorded.

        Args:
            seed: of torch's generator, for operations that have not run yet and have no fixed seed.
        """
        self._run_connected(_storage_id(tensor), seed)
        with _disable_current_modes(), torch.no_grad():
            return self._to_real(as_ref(tensor))

    def require_nothing_hidden(self) -> None:
        """That nobody holds a meta tensor, now that all which were found have values.

        Raises:
            ValueError: saying what made it, and its shape.
        """
        made = [(op, ref) for op in dict.fromkeys(chain(*self._ops_by_key.values())) for ref in op.outputs]
        if any(_is_held(ref.storage) for _, ref in made):
            gc.collect()  # what is in cycles may be held by nobody
        for op, ref in made:
            if _is_held(ref.storage):
                raise ValueError(
                    f"a tensor of shape {tuple(ref.size)} that {op.func.overloadpacket.__name__} made in the "
                    f"constructor is held where it gets no values: by an object that is no module, or by a function. "
                    f"Keep it as a buffer (register_buffer(.., persistent=False)), or as an attribute of a module (a "
                    f"tensor, or in lists, tuples and dicts), and look it up there when it is used"
                )

    def _run_connected(self, key: int, seed: int) -> None:
        """Run all operations connected with a storage, in the recorded order, so that each sees what it saw then."""
        pending, _ = self._connected(key)
        if pending:
            with _disable_current_modes(), _TORCH_RNG.preserved(self._fixed_seeds.get(key, seed)), torch.no_grad():
                for index in sorted(pending):
                    pending[index].run(self._to_real, self._storages)

    def _connected(self, key: int) -> tuple[dict[int, RecordedOp], set[int]]:
        """Operations not yet run that are connected with a storage, by index, and all storages on the way to them.

        Two storages are connected when one operation touches both.
        """
        pending: dict[int, RecordedOp] = {}
        todo, seen = [key], set[int]()
        while todo:
            key = todo.pop()
            if key in seen:
                continue
            seen.add(key)
            for op in self._ops_by_key.get(key, ()):
                if not op.has_run and op.index not in pending:
                    pending[op.index] = op
                    todo.extend(op.touched())
        return pending, seen

    def _to_real(self, leaf: Any) -> Any:
        if not isinstance(leaf, TensorRef):
            return _CPU if isinstance(leaf, torch.device) else leaf
        if leaf.key in self._sharded:
            raise located_error(
                f"the values of a {self._sharded[leaf.key].description} are used while the model is built (copied, "
                f"or computed with), but it has none yet: they are drawn afterwards, from its name and full shape. "
                f"Make each layer by its constructor instead of copy.deepcopy, and compute with weights after the build"
            )
        if leaf.key not in self._storages:
            raise located_error("a tensor made while the model was built has no value: it was made on the meta device")
        real = torch.empty(0, dtype=leaf.dtype)
        real.set_(self._storages[leaf.key], leaf.offset, leaf.size, leaf.stride)
        if leaf.is_conj:
            real = real.conj()
        return real._neg_view() if leaf.is_neg else real


def _is_held(storage: torch.UntypedStorage) -> bool:
    """Whether a tensor has this storage, of which we keep one reference."""
    return bool(torch._C._storage_Use_Count(storage._cdata) > 1)


def _storage_id(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _needs_values(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the result cannot be on meta: a Python number, a shape that depends on values, a copy to a device."""
    if torch.Tag.data_dependent_output in func.tags or torch.Tag.dynamic_output_shape in func.tags:
        return True
    # a parameter stays: Module.to(device) in a constructor has no effect but that of the final device
    device = kwargs.get("device") if func is _aten._to_copy.default else None
    return device is not None and torch.device(device) != _META and not isinstance(args[0], nn.Parameter)


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterable[Tensor]:
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            yield from (leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor))


def _keeps_its_shape(func: Any, inputs: list[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether this is ``normal_``, ``erfinv_`` or another that changes its first argument element by element.

    Only where shapes and dtypes cannot be wrong: else the meta kernel raises, in the line of the constructor.
    """
    elementwise = torch.Tag.pointwise in func.tags or torch.Tag.nondeterministic_seeded in func.tags
    if not elementwise or not torch_versions.is_inplace(func) or not args[0].is_floating_point():
        return False
    shape = args[0].shape
    is_complex = any(isinstance(leaf, complex) for leaf in tree_leaves((args, kwargs)))
    return not is_complex and all(leaf.shape in (shape, ()) and not leaf.is_complex() for leaf in inputs)


def _write_refusal(func: Any, spec: ParameterSpec) -> str:
    if func is _aten.copy_.default:
        return (
            f"copy_ (load_state_dict, say) writes to a {spec.description} while the model is built, but a rank makes "
            f"its shard of a sharded parameter only, afterwards: pass init=Values(tensor) to the layer (see "
            f"colossus.layers.init), or load with colossus.checkpoint.load_full_state_dict once there is an engine"
        )
    return (
        f"{func.overloadpacket.__name__} writes to a {spec.description} while the model is built, but a sharded "
        f"parameter draws its initial value from its name and full shape: pass init=... to the layer (see "
        f"colossus.layers.init) instead of using torch.nn.init on it"
    )
