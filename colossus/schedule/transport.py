"""The transfer of values between stages, as plain local tensors and a `ValueSpec`, and of their gradients back."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten_with_path, tree_unflatten
from torch.utils._pytree import keystr as path_string

from colossus.comm.links import Incoming, Links, Wait
from colossus.layers.model_parallel import ModelParallel
from colossus.schedule.actions import Action
from colossus.sharded_tensor.placement import Placement, placement_of
from colossus.sharded_tensor.tensor import plain, wrap

_unsafe_view = torch.ops.aten._unsafe_view.default
_CONSTANTS = (int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)


@dataclass(frozen=True, repr=False)
class TensorSpec:
    """The description of one tensor of a value.

    Attributes:
        shape: the shape of this rank's shard.
        dtype: its dtype.
        needs_gradient: whether its gradient is sent back to the stage that made it.
        placement: the placement of a `ShardedTensor`, without its ``parallel``; None for a plain tensor.
    """

    shape: torch.Size
    dtype: torch.dtype
    needs_gradient: bool
    placement: Placement | None

    def __repr__(self) -> str:
        kind = f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"
        return kind if self.needs_gradient else f"{kind} (no gradient)"


@dataclass(frozen=True)
class RepeatedTensor:
    """A leaf that is the same tensor as the one at ``index`` of the value's tensors, which is sent once."""

    index: int

    def __repr__(self) -> str:
        return f"tensor {self.index} again"


@dataclass(frozen=True)
class ValueSpec:
    """The description of a value without the contents of its tensors.

    Attributes:
        tree: the structure of the nest.
        leaves: its leaves, with a `TensorSpec` or `RepeatedTensor` in place of each tensor.
    """

    tree: TreeSpec
    leaves: tuple[Any, ...]

    @property
    def tensors(self) -> list[TensorSpec]:
        return [leaf for leaf in self.leaves if isinstance(leaf, TensorSpec)]

    @property
    def differentiable(self) -> list[TensorSpec]:
        """The tensors whose gradients are sent back."""
        return [leaf for leaf in self.tensors if leaf.needs_gradient]

    def __str__(self) -> str:
        return str(tree_unflatten(self.leaves, self.tree))


def flatten_value(value: Any, parallel: ModelParallel, where: str) -> tuple[ValueSpec, list[Tensor]]:
    """Return the spec of a value, and its tensors as plain local ones, still in the autograd graph.

    Args:
        value: a nest of tensors and constants.
        parallel: the `ModelParallel` of the model's layers.
        where: the name of the stage that made the value, for errors.

    Raises:
        ValueError: a leaf cannot be sent.
    """
    paths_and_leaves, tree = tree_flatten_with_path(value)
    leaves: list[Any] = []
    tensors: list[Tensor] = []
    index_of: dict[int, int] = {}
    for path, item in paths_and_leaves:
        if isinstance(item, Tensor) and id(item) in index_of:
            leaves.append(RepeatedTensor(index_of[id(item)]))
        elif isinstance(item, Tensor):
            index_of[id(item)] = len(tensors)
            placement, local = placement_of(item), plain(item)
            if placement is not None:
                placement = replace(placement, parallel=None)  # type: ignore[arg-type]  # each rank has its own
            needs = item.requires_grad and torch.is_grad_enabled()
            leaves.append(TensorSpec(local.shape, local.dtype, needs, placement))
            tensors.append(local)
        elif isinstance(item, _CONSTANTS):
            leaves.append(item)
        else:
            raise ValueError(
                f"{where} returned {type(item).__name__} at {path_string(path) or 'its top'}; a stage must pass a "
                f"tensor to the next, or a nest of tuples, lists and dicts of tensors, numbers and strings"
            )
    return ValueSpec(tree, tuple(leaves)), tensors


def unflatten_value(spec: ValueSpec, tensors: Iterable[Tensor], parallel: ModelParallel) -> tuple[Any, list[Tensor]]:
    """Return the value with these tensors, detached, and those of its autograd leaves whose gradient is sent back."""
    rest = iter(tensors)
    items: list[Any] = []
    made: list[Tensor] = []
    roots: list[Tensor] = []
    for leaf in spec.leaves:
        if not isinstance(leaf, TensorSpec):
            items.append(made[leaf.index] if isinstance(leaf, RepeatedTensor) else leaf)
            continue
        local = next(rest).detach()
        if leaf.needs_gradient:
            roots.append(local.requires_grad_())
            local = _unsafe_view(local, local.shape)  # not a leaf, since a stage may begin with an in-place operation
        if leaf.placement is not None:
            local = wrap(local, replace(leaf.placement, parallel=parallel))
        made.append(local)
        items.append(local)
    return tree_unflatten(items, spec.tree), roots


def batch_signature(batch: Any) -> tuple[Any, ...]:
    """Return structure, shapes and dtypes of a batch, and whether gradients are enabled.

    The values that stages pass on have one spec for each signature.
    """
    paths_and_leaves, tree = tree_flatten_with_path(batch)
    tensors = [(tuple(item.shape), item.dtype) for _, item in paths_and_leaves if isinstance(item, Tensor)]
    return str(tree), tuple(tensors), torch.is_grad_enabled()


class Transport:
    """The transfers of one rank.

    Args:
        links: the links to the other ranks of the pipeline.
        rank_of: stage -> index of the rank that has it.

    Attributes:
        step_id: identifies the step, the same on all ranks of a model; two ranks that disagree get an error.
    """

    def __init__(self, links: Links, rank_of: Mapping[int, int]) -> None:
        self.links, self._rank_of = links, rank_of
        self.step_id: object = None
        #: (stage that makes the value, signature of the batch) -> spec
        self._specs: dict[tuple[int, Hashable], ValueSpec] = {}
        self._posted: dict[Action, tuple[ValueSpec, Incoming]] = {}
        self._unflushed: dict[tuple[str, int, int], Wait] = {}

    def expect(self, specs: Mapping[int, ValueSpec], signature: Hashable) -> None:
        """Set the specs of the stages' outputs for a signature of batches, on all ranks alike, so that none is sent."""
        self._specs |= {(stage, signature): spec for stage, spec in specs.items()}

    # -- sending ------------------------------------------------------------------------------------------

    def send_value(self, action: Action, spec: ValueSpec, tensors: Sequence[Tensor], signature: Hashable) -> None:
        """Send a stage's output; for the first batch of a signature, send its spec before it.

        Raises:
            ValueError: the spec differs from that of an earlier output for a batch of the same signature.
        """
        first_spec = self._specs.get((action.stage, signature))
        if first_spec is None:
            self._specs[action.stage, signature] = spec
            self.links.send_object(self._peer(action), spec, f"description of the {action.message}")
        elif first_spec != spec:
            raise ValueError(
                f"stage {action.stage} returned {spec} for microbatch {action.microbatch}, but {first_spec} for an "
                f"earlier one of the same shape: a stage's output must look the same for all batches of one shape. "
                f"Pass a number that changes as a tensor, pad what depends on values, and make a new engine when "
                f"parameters are frozen"
            )
        self.send(action, tensors)

    def send(self, action: Action, tensors: Sequence[Tensor]) -> None:
        """Start a send. Its tensors must not change until the peer's gradient for them arrives, or until `flush`."""
        if action.kind == "send_gradient":  # `wait_gradient` waits for the send of an activation, nothing for this one
            self._flush(action.kind, action.stage, action.microbatch - 1)
        key = action.kind, action.stage, action.microbatch
        self._unflushed[key] = self.links.send(self._peer(action), tensors, action.message, self.step_id)

    # -- receiving ----------------------------------------------------------------------------------------

    def post_receive(self, action: Action, signature: Hashable, *, early: bool = False) -> bool:
        """Post the receive of a stage's input, or of the gradient of its output, unless it has been posted.

        Args:
            action: the receive.
            signature: the signature of the batch.
            early: it is not the receive's turn yet; then it is not posted where the value's spec is not known.

        Returns:
            Whether it has been posted. Later receives must not be posted before it, since messages have no tags.
        """
        if action in self._posted:
            return True
        is_gradient = action.kind == "receive_gradient"
        made_by = action.stage if is_gradient else action.peer
        assert made_by is not None
        spec = self._specs.get((made_by, signature))
        if spec is None:
            if early:
                return False
            spec = self.links.receive_object(self._peer(action), f"description of the {action.message}")
            self._specs[made_by, signature] = spec
        tensors = spec.differentiable if is_gradient else spec.tensors
        incoming = self.links.receive(self._peer(action), tensors, action.message, self.step_id)
        self._posted[action] = spec, incoming
        return True

    def wait_value(self, stage: int, microbatch: int) -> tuple[ValueSpec, list[Tensor]]:
        """Wait for a stage's input, and return it."""
        spec, incoming = self._posted.pop(Action("receive_activation", stage, microbatch, stage - 1))
        return spec, incoming.wait()

    def wait_gradient(self, stage: int, microbatch: int) -> list[Tensor]:
        """Wait for the gradients of those tensors of a stage's output that require one, and return them."""
        _, incoming = self._posted.pop(Action("receive_gradient", stage, microbatch, stage + 1))
        arrived = incoming.wait()
        self._flush("send_activation", stage, microbatch)
        return arrived

    def flush(self) -> None:
        """Wait until all sent tensors may be changed."""
        for wait in self._unflushed.values():
            wait()
        self._unflushed.clear()

    def _flush(self, kind: str, stage: int, microbatch: int) -> None:
        wait = self._unflushed.pop((kind, stage, microbatch), None)
        if wait is not None:
            wait()

    def _peer(self, action: Action) -> int:
        assert action.peer is not None
        return self._rank_of[action.peer]
