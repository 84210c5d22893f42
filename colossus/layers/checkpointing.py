"""Activation checkpointing, full or selective, whose recomputation draws the random numbers of the first pass again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from colossus.comm import accounting
from colossus.context.parallel_context import ParallelContext
from colossus.error_place import located_error
from colossus.random import GlobalRng
from colossus.sequence_parallel.ring_attention import RING_ATTENTION
from colossus.sharded_tensor.placement import Placement
from colossus.sharded_tensor.tensor import mark, placement_of, plain


def recompute(
    function: Callable[..., Any],
    *args: Any,
    context: ParallelContext,
    kind: str = "full",
    preserve_rng_state: bool = True,
    title: str = "a function under activation checkpointing",
) -> Any:
    """``function(*args)`` whose activations are computed again in backward instead of kept.

    A recomputation ends as soon as it has made all that backward needs: products and collectives behind that are not
    repeated.

    Args:
        function: its arguments are nests of anything; tensors in them that torch's pytree finds are saved for backward.
        context: its random streams are set back for the recomputation.
        kind: ``full`` keeps the inputs only; ``selective`` also keeps matmuls, attention and collectives.
        preserve_rng_state: whether the global generators of torch, Python and numpy are set back, too. False is faster,
            and right for a function that draws from the context's streams alone.
        title: how errors name the function.

    Raises:
        ValueError: for another kind, and for a function that changes its inputs or, under ``selective``, a result that
            is kept in place.
    """
    check_kind(kind)
    if not torch.is_grad_enabled():
        return function(*args)
    tensors, rebuild = _tensors_of(args)
    versions = [tensor._version for tensor in tensors]
    again = _setting_back(context, kind, preserve_rng_state)
    first, repeated = _keeping() if kind == "selective" else (nullcontext(), nullcontext())
    is_first = True

    def run(*tensors: Tensor) -> Any:
        nonlocal is_first
        rebuilt = rebuild(tensors)
        if is_first:
            is_first = False
            with first:
                return function(*rebuilt)
        with again(), repeated:
            return function(*rebuilt)

    out = torch_checkpoint(run, *tensors, use_reentrant=False, preserve_rng_state=False)
    for tensor, version in zip(tensors, versions, strict=True):
        if tensor._version != version:
            raise located_error(
                f"{title} changes its input of shape {tuple(tensor.shape)} in place, so that it cannot be computed "
                f"again from it: let it begin with something that makes a new tensor (nn.ReLU(), not "
                f"nn.ReLU(inplace=True)), or leave it out"
            )
    return out


checkpoint = recompute


def check_kind(kind: str) -> None:
    """Raise ValueError for what `recompute` does not know."""
    if kind not in ("full", "selective"):
        raise located_error(f"activation checkpointing {kind!r}: use 'full' or 'selective'")


# -- what a recomputation starts from ---------------------------------------------------------------------------


class _Slot(NamedTuple):
    """The place of a tensor in a nest of arguments."""

    number: int


def _tensors_of(nest: Any) -> tuple[list[Tensor], Callable[[tuple[Tensor, ...]], Any]]:
    """The tensors of a nest, each once, plain and local; and what makes the nest again of such tensors."""
    leaves, tree = tree_flatten(nest)
    slots: dict[int, _Slot] = {}
    tensors: list[Tensor] = []
    placements: list[Placement | None] = []
    for place, leaf in enumerate(leaves):
        if not isinstance(leaf, Tensor):
            continue
        if id(leaf) not in slots:
            slots[id(leaf)] = _Slot(len(tensors))
            tensors.append(plain(leaf))
            placements.append(placement_of(leaf))
        leaves[place] = slots[id(leaf)]

    def rebuild(tensors: tuple[Tensor, ...]) -> Any:
        made = [tensor if at is None else mark(tensor, at) for tensor, at in zip(tensors, placements, strict=True)]
        return tree_unflatten([made[leaf.number] if isinstance(leaf, _Slot) else leaf for leaf in leaves], tree)

    return tensors, rebuild


def _setting_back(context: ParallelContext, kind: str, generators: bool) -> Callable[[], AbstractContextManager[None]]:
    """What is to be around a recomputation of a function that is called now."""
    rng, position = context.rng, context.rng.snapshot()
    devices = {torch.device("cpu"), context.device} if generators else ()
    global_rng = GlobalRng(tuple(devices), torch_only=not generators)
    state = global_rng.get_state()

    @contextmanager
    def again() -> Iterator[None]:
        # under "selective" the results of collectives are kept: nothing is sent
        counting = accounting.paused() if kind == "selective" else nullcontext()
        with counting, rng.replay(position), global_rng.preserved():
            global_rng.set_state(state)
            yield

    return again


# -- what selective keeps ---------------------------------------------------------------------------------------

_aten, _c10d = torch.ops.aten, torch.ops._c10d_functional
#: operations whose results ``selective`` keeps: matmuls, convolutions, attention and collectives
SAVED = {
    _aten.mm.default,
    _aten.addmm.default,
    _aten.bmm.default,
    _aten.baddbmm.default,
    _aten._scaled_mm.default,
    _aten._grouped_mm.default,
    _aten.convolution.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
    _aten._scaled_dot_product_fused_attention_overrideable.default,
    _c10d.all_reduce.default,
    _c10d.all_gather_into_tensor.default,
    _c10d.reduce_scatter_tensor.default,
    _c10d.all_to_all_single.default,
    _c10d.wait_tensor.default,
    RING_ATTENTION,
}


def _keeping() -> tuple[_KeptOnly, _KeptOnly]:
    """What a first pass and its recomputations run in."""
    keep, give_back = create_selective_checkpoint_contexts(lambda *_, **__: CheckpointPolicy.MUST_SAVE)
    return _KeptOnly(keep), _KeptOnly(give_back, gives_back=True)


class _KeptOnly(TorchDispatchMode):
    """One of torch's pair of modes, which is shown only operations whose results are kept.

    Of others a recomputation may run more than the first pass did, which torch refuses: lookups in tables do, which
    serve the other ranks, too.
    """

    def __init__(self, mode: Any, *, gives_back: bool = False) -> None:
        super().__init__()
        self._mode, self._gives_back = mode, gives_back

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not is_kept(func, args):
            return func(*args, **(kwargs or {}))
        try:
            return self._mode.__torch_dispatch__(func, types, args, kwargs)
        except RuntimeError as error:
            if not self._gives_back:
                raise
            raise located_error(
                f"selective activation checkpointing keeps the result of {func} for one backward, and nothing may "
                f"change it in place ({error}): take nn.ReLU() behind a linear, not nn.ReLU(inplace=True). nn.LSTM, "
                f"nn.GRU and nn.RNN change it inside of themselves, and retain_graph=True runs backward twice: both "
                f"work with type 'full'"
            ) from error


def is_kept(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether it is of `SAVED`, and no attention that drops: what is not drawn again shifts what is drawn after it."""
    if func not in SAVED:
        return False
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return True
    names = [argument.name for argument in func._schema.arguments]
    return "dropout_p" not in names or not any(args[names.index("dropout_p") :][:1])
