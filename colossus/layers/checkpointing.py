"""Activation checkpointing, full or selective, whose recomputation draws the random numbers of the first pass again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from colossus.comm.kept_results import KeptReads, KeptResults
from colossus.context.parallel_context import ParallelContext
from colossus.error_place import located_error
from colossus.random import GlobalRng
from colossus.sequence_parallel.ring_attention import RING_ATTENTION
from colossus.sharded_tensor.placement import placement_of
from colossus.sharded_tensor.tensor import mark, plain_of_graph

#: a copy of a buffer with fewer bytes is kept even if it seems unchanged, since batch normalisation writes to buffers
#: without a new version
_SMALL = 1 << 16


def recompute(
    function: Callable[..., Any],
    *args: Any,
    context: ParallelContext,
    kind: str = "full",
    preserve_rng_state: bool = True,
    title: str = "a function under activation checkpointing",
) -> Any:
    """Call ``function(*args)`` with activations that are computed again in backward instead of kept.

    A recomputation ends as soon as it has everything that backward needs: it does not repeat later products and
    collectives.

    Args:
        function: its arguments are nests of anything; tensors in them that torch's pytree finds are saved for backward.
        context: its random streams are set back for the recomputation.
        kind: ``full`` keeps only the inputs; ``selective`` also keeps the results of products, attention and
            collectives, so that it repeats none of them, and no more bytes than without checkpointing. Of a distributed
            product it keeps the result alone. See the note in `colossus.comm.kept_results`.
        preserve_rng_state: also set back the global generators of torch, Python and numpy. False is faster, and right
            for a function that draws only from the context's streams.
        title: name of the function in errors.

    Raises:
        ValueError: another kind, or the function changes its inputs in place or, under ``selective``, a kept result.
    """
    check_kind(kind)
    if not torch.is_grad_enabled():
        return function(*args)
    tensors, rebuild = _tensors_of(args)
    versions = [tensor._version for tensor in tensors]
    rng, position = context.rng, context.rng.snapshot()
    devices = {torch.device("cpu"), context.device} if preserve_rng_state else ()
    global_rng = GlobalRng(tuple(devices), torch_only=not preserve_rng_state)
    state = global_rng.get_state()
    results, reads = KeptResults(is_unit) if kind == "selective" else None, KeptReads()
    is_first = True

    def run(*tensors: Tensor) -> Any:
        nonlocal is_first
        arguments = rebuild(tensors)
        if is_first:
            is_first = False
            with results.first_pass() if results else nullcontext(), reads.running():
                return function(*arguments)
        again = results.recomputation() if results else nullcontext()
        with rng.replay(position), global_rng.preserved(), again, reads.running():
            global_rng.set_state(state)
            return function(*arguments)

    out = torch_checkpoint(run, *tensors, use_reentrant=False, preserve_rng_state=False)
    for tensor, version in zip(tensors, versions, strict=True):
        if tensor._version != version:
            raise located_error(
                f"{title} changes its input of shape {tuple(tensor.shape)} in place, so that it cannot be computed "
                f"again from it: begin it with an operation that makes a new tensor (nn.ReLU(), not "
                f"nn.ReLU(inplace=True)), or do not checkpoint it"
            )
    return out


checkpoint = recompute


def check_kind(kind: str) -> None:
    """Raise ValueError for a kind that `recompute` does not know."""
    if kind not in ("full", "selective"):
        raise located_error(f"activation checkpointing {kind!r}: use 'full' or 'selective'")


class _Slot(NamedTuple):
    """The place of a tensor in a nest of arguments."""

    number: int


def _tensors_of(nest: Any) -> tuple[list[Tensor], Callable[[tuple[Tensor, ...]], Any]]:
    """Return the tensors of a nest, each once, plain and local, and a function that makes the nest of such tensors."""
    leaves, tree = tree_flatten(nest)
    distinct = {id(leaf): leaf for leaf in leaves if isinstance(leaf, Tensor)}
    slots = {key: _Slot(number) for number, key in enumerate(distinct)}
    leaves = [slots[id(leaf)] if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    placements = [placement_of(x) for x in distinct.values()]

    def rebuild(tensors: tuple[Tensor, ...]) -> Any:
        marked = [tensor if at is None else mark(tensor, at) for tensor, at in zip(tensors, placements, strict=True)]
        return tree_unflatten([marked[leaf.number] if isinstance(leaf, _Slot) else leaf for leaf in leaves], tree)

    return [plain_of_graph(x) for x in distinct.values()], rebuild


# -- modules ----------------------------------------------------------------------------------------------------


def checkpoint_module(module: nn.Module, kind: str, context: ParallelContext) -> None:
    """Let a module compute its activations again in backward: its ``forward``, not its hooks, which run once.

    It does so only in training, and where gradients are wanted. Buffers that the forward changes (running statistics)
    are changed once.

    Args:
        kind: see `recompute`.

    Raises:
        ValueError: another kind, or the module is checkpointed already, or has no forward.
    """
    check_kind(kind)
    if is_checkpointed(module):
        raise located_error(f"{type(module).__name__}: its activations are checkpointed already; once is enough")
    if not has_forward(module):
        raise located_error(
            f"{type(module).__name__} has no forward, so that only the modules in it are called: checkpoint these "
            f"modules"
        )
    module.__dict__["forward"] = CheckpointedForward(module, kind, context)


def has_forward(module: nn.Module) -> bool:
    """Return whether a module can be called: a ModuleList, a ModuleDict and a bare nn.Module only contain others."""
    return "forward" in module.__dict__ or type(module).forward is not nn.Module.forward


def is_checkpointed(module: nn.Module) -> bool:
    """Return whether `checkpoint_module` was called for a module."""
    return isinstance(module.__dict__.get("forward"), CheckpointedForward)


class CheckpointedForward:
    """The replacement of ``module.forward``: an object, so that a copy of the module has one of its own."""

    def __init__(self, module: nn.Module, kind: str, context: ParallelContext) -> None:
        self._module, self._kind, self._context = module, kind, context
        #: a ``forward`` that was assigned to this module alone
        self._replaced = module.__dict__.get("forward")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self._module
        if not module.training or not torch.is_grad_enabled():
            return self._forward(args, kwargs)
        foreign = [name for name, inner in module.named_modules() if not _is_ours(inner)]
        buffers: dict[str, Tensor] | None = None

        def forward(args: Any, kwargs: Any) -> Any:
            nonlocal buffers
            if buffers is None:
                buffers = {}
                with _copied_buffers(module, foreign, buffers):
                    return self._forward(args, kwargs)
            with _reparametrize_module(module, {name: x.clone() for name, x in buffers.items()}):
                return self._forward(args, kwargs)

        return recompute(
            forward,
            args,
            kwargs,
            context=self._context,
            kind=self._kind,
            preserve_rng_state=bool(foreign),
            title=getattr(module, "title", type(module).__name__),
        )

    def _forward(self, args: Any, kwargs: Any) -> Any:
        if self._replaced is not None:
            return self._replaced(*args, **kwargs)
        return type(self._module).forward(self._module, *args, **kwargs)


def _is_ours(module: nn.Module) -> bool:
    """Return whether a module draws only from the streams of the context, and changes no buffer a second time."""
    replaced = module.__dict__.get("forward")
    mine = type(module).__module__.startswith("colossus.")
    return mine and (replaced is None or isinstance(replaced, CheckpointedForward))


@contextmanager
def _copied_buffers(module: nn.Module, names: list[str], copies: dict[str, Tensor]) -> Iterator[None]:
    """Fill ``copies`` with the buffers of these inner modules from before the first pass, if it may have changed them.

    Recomputations take the copies, so that they change nothing.
    """
    buffers = {
        f"{name}.{key}" if name else key: x
        for name in names
        for key, x in module.get_submodule(name)._buffers.items()
        if x is not None
    }
    versions = {name: x._version for name, x in buffers.items()}
    copies.update({name: x.detach().clone() for name, x in buffers.items()})
    yield
    for name, x in buffers.items():
        if x._version == versions[name] and x.nbytes > _SMALL:
            del copies[name]


# -- what selective keeps ---------------------------------------------------------------------------------------

_aten, _c10d = torch.ops.aten, torch.ops._c10d_functional
#: operators of torch whose results ``selective`` keeps: products, convolutions, attention, and a user's own collectives
UNITS = {
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


def is_unit(func: Any, args: tuple[Any, ...]) -> bool:
    """Return whether selective keeps the result of an operator: one of `UNITS`, except attention with dropout.

    A draw that is not repeated would shift the draws after it.
    """
    if func not in UNITS:
        return False
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return True
    names = [argument.name for argument in func._schema.arguments]
    return "dropout_p" not in names or not any(args[names.index("dropout_p") :][:1])
