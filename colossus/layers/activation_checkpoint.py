"""Activation checkpointing, full or selective, whose recomputation draws the random numbers of the first pass again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from colossus.comm import accounting
from colossus.context.parallel_context import ParallelContext
from colossus.error_place import located_error
from colossus.layers.host_memory import OffloadedInputs, goes_to_host
from colossus.layers.selective_checkpoint import selective_contexts
from colossus.layers.sharded import SplitTensor
from colossus.layers.tokens import SplitTokens, local, with_tokens
from colossus.random import GlobalRng

KINDS = ("full", "selective")


def checkpoint(
    function: Callable[..., Any],
    *args: Any,
    context: ParallelContext,
    kind: str = "full",
    preserve_rng_state: bool = True,
    offload: bool = False,
    title: str = "",
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
        offload: what is kept waits in the memory of the host.
        title: how errors name the function.

    Raises:
        ValueError: for another kind, and for a function that changes its inputs in place.
    """
    if kind not in KINDS:
        raise located_error(f"activation checkpointing {kind!r}: use 'full' or 'selective'")
    if not torch.is_grad_enabled():
        return function(*args)
    inputs = _Inputs(args)
    versions = inputs.versions()
    repeated = _Repeated(context, kind, preserve_rng_state)
    first = [args]

    def run(*tensors: Tensor) -> Any:
        if first:  # taken out: from here on they are in what is saved only, which may be on the host
            return function(*first.pop())
        with repeated.again():
            return function(*inputs.rebuild(tensors))

    options: dict[str, Any] = {}
    if kind == "selective":
        options["context_fn"] = partial(selective_contexts, offload=offload)
    tensors = inputs.take()
    with OffloadedInputs() if offload else nullcontext():
        out = torch_checkpoint(run, *tensors, use_reentrant=False, preserve_rng_state=False, **options)
    for tensor, version in zip(tensors, versions, strict=True):
        if tensor._version != version and not (offload and goes_to_host(tensor)):
            raise located_error(
                f"{title or 'a function under activation checkpointing'} changes its input of shape "
                f"{tuple(tensor.shape)} in place, so that it cannot be computed again from it: let it begin with "
                f"something that makes a new tensor (nn.ReLU(), not nn.ReLU(inplace=True)), or leave it out"
            )
    return out


class _Inputs:
    """The arguments of a function, with their tensors taken out: each once, plain and local."""

    def __init__(self, nest: Any) -> None:
        leaves, self._tree = tree_flatten(nest)
        self._tensors: list[Tensor] = []
        #: of each leaf: the number of its tensor and what marks that again, or the leaf itself
        self._leaves: list[tuple[int, Any]] = []
        known: dict[int, tuple[int, Any]] = {}
        for leaf in leaves:
            if not isinstance(leaf, Tensor):
                self._leaves.append((-1, leaf))
                continue
            if id(leaf) not in known:
                plain, mark = take_apart(leaf)
                known[id(leaf)] = len(self._tensors), mark
                self._tensors.append(plain)
            self._leaves.append(known[id(leaf)])

    def versions(self) -> list[int]:
        return [tensor._version for tensor in self._tensors]

    def take(self) -> list[Tensor]:
        """The tensors, which are not held from here on."""
        tensors, self._tensors = self._tensors, []
        return tensors

    def rebuild(self, tensors: Sequence[Tensor]) -> Any:
        """The nest with these tensors in the place of what was taken out."""
        made: dict[int, Any] = {}
        leaves = []
        for number, leaf in self._leaves:
            if number >= 0 and number not in made:
                made[number] = tensors[number] if leaf is None else leaf(tensors[number])
            leaves.append(made[number] if number >= 0 else leaf)
        return tree_unflatten(leaves, self._tree)


def take_apart(x: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor] | None]:
    """A tensor as a plain local one, and what makes one like it of that; None where it is plain."""
    if isinstance(x, SplitTensor):
        return x.take_apart()
    if isinstance(x, SplitTokens):
        return local(x), partial(with_tokens, token_dim=x.token_dim, num_ranks=x.num_ranks)
    return x, None


class _Repeated:
    """What a first pass began with that is no argument: random streams and generators."""

    def __init__(self, context: ParallelContext, kind: str, generators: bool) -> None:
        self._rng, self._kind = context.rng, kind
        self._position = context.rng.snapshot()
        self._generators = GlobalRng(tuple({torch.device("cpu"), context.device})) if generators else None
        self._state = self._generators.get_state() if self._generators is not None else None

    @contextmanager
    def again(self) -> Iterator[None]:
        """Around the recomputation."""
        with ExitStack() as stack:
            stack.enter_context(self._rng.replay(self._position))
            if self._generators is not None and self._state is not None:
                stack.enter_context(self._generators.preserved())
                self._generators.set_state(self._state)
            if self._kind == "selective":  # the result of every collective is kept: nothing is sent
                stack.enter_context(accounting.paused())
            yield
