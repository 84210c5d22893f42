"""Which operations selective activation checkpointing keeps the results of, and the pair of modes that does it."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from colossus.error_place import located_error
from colossus.layers.host_memory import from_host, is_weight, to_host
from colossus.sequence_parallel.ring import RING_ATTENTION

_c10d = torch.ops._c10d_functional
#: collectives that are on their way until `wait_tensor` gives their result
_STARTED = {
    _c10d.all_reduce.default,
    _c10d.all_gather_into_tensor.default,
    _c10d.reduce_scatter_tensor.default,
    _c10d.all_to_all_single.default,
}


def _of_aten(*names: str) -> set[Any]:
    """The operations of these names that this version of torch has."""
    packets = (getattr(torch.ops.aten, name, None) for name in names)
    return {packet.default for packet in packets if packet is not None}


#: operations whose results ``selective`` keeps: matmuls, convolutions, attention and collectives
SAVED = {
    *_of_aten("mm", "addmm", "bmm", "baddbmm", "_scaled_mm", "_grouped_mm", "convolution"),
    *_of_aten(
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_fused_attention_overrideable",
    ),
    *_STARTED,
    _c10d.wait_tensor.default,
    RING_ATTENTION,
}


def selective_contexts(*, offload: bool = False) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """What a first pass and its recomputation run in, for ``context_fn`` of `torch.utils.checkpoint.checkpoint`.

    The results of `SAVED` are kept in the first and given back in the second, each once. torch's own
    ``create_selective_checkpoint_contexts`` does that without offloading, and keeps attention whose dropout draws from
    torch's generators, which shifts what is drawn after it in the recomputation: that is computed again here.

    Args:
        offload: what is kept waits in the host's memory; not what is gathered of a parameter.
    """
    kept: dict[Any, deque[Any]] = defaultdict(deque)
    return _Keep(kept, offload), _GiveBack(kept)


class _Kept:
    """One tensor: what there is of it, and that nobody changes it."""

    __slots__ = ("_kept", "_version")

    def __init__(self, x: Tensor, offload: bool = False) -> None:
        # not the tensor itself, which autograd will make a part of the graph; of one version with it
        with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
            alias = x.detach()
        self._kept = to_host(alias) if offload else alias
        self._version = alias._version

    def get(self, func: Any) -> Tensor:
        if isinstance(self._kept, Tensor) and self._kept._version != self._version:
            raise located_error(
                f"selective activation checkpointing keeps the result of {func}, but it is changed in place "
                f"afterwards, so that backward would compute with another one. nn.ReLU(inplace=True) behind it does "
                f"that: take what makes a new tensor. nn.LSTM, nn.GRU and nn.RNN do it inside of themselves: take "
                f"activation checkpointing of type 'full', with which both work"
            )
        return from_host(self._kept)


def _is_saved(func: Any, args: Any, kwargs: Any) -> bool:
    return func in SAVED and not (torch.Tag.nondeterministic_seeded in func.tags and _drops(func, args, kwargs))


def _drops(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether an attention has dropout, and so draws."""
    for number, argument in enumerate(func._schema.arguments):
        if argument.name == "dropout_p":
            given = args[number] if number < len(args) else kwargs.get("dropout_p", argument.default_value)
            return bool(given)
    return False


class _Keep(TorchDispatchMode):
    def __init__(self, kept: dict[Any, deque[Any]], offload: bool) -> None:
        super().__init__()
        self._kept, self._offload = kept, offload
        #: places of parameters that are being gathered
        self._weights: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if _is_saved(func, args, kwargs):
            keep = _Kept if not self._offload else self._how(func, args[0], out)
            self._kept[func].append(tree_map_only(Tensor, keep, out))
        return out

    def _how(self, func: Any, x: Any, out: Any) -> Callable[[Tensor], Any]:
        """How a result is kept where results are offloaded."""
        if func in _STARTED:  # it is not there yet, and is the memory of what `wait_tensor` gives
            if is_weight(x):
                self._weights.add(out.data_ptr())
            return lambda x: _Kept(x.new_empty(()).expand(x.shape))
        if func == _c10d.wait_tensor.default and x.data_ptr() in self._weights:
            self._weights.discard(x.data_ptr())
            return _Kept
        return partial(_Kept, offload=True)


class _GiveBack(TorchDispatchMode):
    def __init__(self, kept: dict[Any, deque[Any]]) -> None:
        super().__init__()
        self._kept = kept

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not _is_saved(func, args, kwargs):
            return func(*args, **kwargs)
        if not self._kept[func]:
            raise located_error(
                f"selective activation checkpointing has no result of {func} any more: the recomputation calls it more "
                f"often than the forward did, or backward runs twice (retain_graph=True), which type 'full' allows"
            )
        return tree_map_only(_Kept, lambda kept: kept.get(func), self._kept[func].popleft())
