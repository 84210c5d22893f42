"""The prefetch of blocks: each block of a model is gathered while the one before it runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import nn
from torch.autograd.graph import Node

from colossus.comm.autograd import uncompiled
from colossus.data_parallel.zero.sharded_block import ShardedBlock
from colossus.nest import tensors


class BlockRuns:
    """The runs of blocks: a block is gathered when it runs, and the gather of the next one starts, at most one ahead.

    The next block is predicted to be the one that followed the last time, in forwards and in backwards apart. For the
    first backward it is the one before in the forward. All ranks that share rows run the same blocks in the same order,
    so their predictions agree. Where another block comes, all of them wait for the predicted gather and drop it.

    Attributes:
        on_backward: called with a block whose backward is over, before the block is released.
        is_running: whether a step or an evaluation runs.
    """

    def __init__(self) -> None:
        self.on_backward: Callable[[ShardedBlock], None] = lambda block: None
        self.is_running = False
        #: block, whether in backward -> the block gathered after it
        self._next: dict[tuple[ShardedBlock, bool], ShardedBlock] = {}
        self._last: tuple[ShardedBlock, bool] | None = None
        #: the block whose gather has been started ahead
        self._ahead: ShardedBlock | None = None
        #: the block whose gather starts when the block that ran before has been released
        self._waiting: ShardedBlock | None = None
        self._in_backward: list[ShardedBlock] = []

    def begin(self) -> None:
        """Begin a forward or backward of a stage; the block that ran before it predicts nothing."""
        self._last = self._waiting = None
        self._drop_ahead()

    def gather(self, block: ShardedBlock) -> None:
        """Make a block whole, and start the gather of the next one."""
        if block.is_whole:
            block.gather()  # a user's code may have put other parameters into the modules
            return
        if self._ahead is not block:
            self._drop_ahead()
        self._ahead = self._waiting = None
        block.gather()
        # -1: no backward is running
        key = block, torch._C._current_graph_task_id() != -1
        if self._last is not None and self._last[1] == key[1]:
            self._next[self._last] = block
            if not key[1]:
                self._next.setdefault((block, True), self._last[0])
        self._last = key
        following = self._next.get(key)
        if following is not None and following is not block and not following.is_whole:
            self._waiting = following
            self.after_release()

    def after_release(self) -> None:
        """Start the gather of the waiting block, if the block before it has been released."""
        if self._waiting is None or any(block.frees_after_forward for block in self._in_backward[:-1]):
            return
        self._ahead, self._waiting = self._waiting, None
        self._ahead.start_gather()

    def enter_backward(self, block: ShardedBlock, call: object) -> None:
        """Begin the backward of one forward of a block."""
        if call not in block.in_backward:
            block.in_backward.append(call)
        # under create_graph no hook runs in the backward of this backward
        block.stays_for_step = block.stays_for_step or torch.is_grad_enabled()
        if block in self._in_backward:
            self._in_backward.remove(block)
        self._in_backward.append(block)
        self.gather(block)

    def leave_backward(self, block: ShardedBlock, call: object) -> None:
        """End the backward of one forward of a block, if it has begun and not ended."""
        if call not in block.in_backward:
            return
        is_last = len(block.in_backward) == 1  # a block that runs twice in a row may have begun its other backward
        if is_last:
            self._in_backward.remove(block)
            self.on_backward(block)
        block.after_backward(call)
        if is_last:
            self.after_release()

    def leave_all(self) -> None:
        """End all backwards of a stage, also of blocks whose inputs get no gradient."""
        for block in list(self._in_backward):
            for call in list(block.in_backward):
                self.leave_backward(block, call)

    def reset(self) -> None:
        """Forget the runs of a step or an evaluation that is over."""
        self._last = self._ahead = self._waiting = None
        self._in_backward.clear()

    def _drop_ahead(self) -> None:
        if self._ahead is not None:
            self._ahead.drop_gather()
        self._ahead = None


class ModuleHook:
    """A hook of ZeRO on a user's module, which refuses calls of a copy of the module, and pickling.

    A copy of the module has the hook, too, but its parameters are rows that nothing gathers.
    """

    def __init__(self, module: nn.Module, function: Callable[..., Any]) -> None:
        self._module, self._function = module, function

    def __call__(self, called: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if called is not self._module:
            raise ValueError(_refusal("a copy of a model under parallel.zero cannot be called"))
        return self._function(called, *args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> ModuleHook:
        return self

    def __reduce__(self) -> NoReturn:
        raise ValueError(_refusal("a model under parallel.zero cannot be pickled"))


def _refusal(what: str) -> str:
    return (
        f"{what}: this rank has only some rows of its parameters. Use colossus.plain(engine), which is the model in "
        f"one process, or save a checkpoint (engine.checkpoints.save)"
    )


def run_around(module: nn.Module, block: ShardedBlock, runs: BlockRuns) -> None:
    """Gather a block before its module's forward and backward, and release it after each."""
    #: of the last forward: an object that stands for it, whether the gradients of its inputs show that its backward is
    #: over, and the number of the first node that it makes
    call, ends_at_input, first_node = object(), False, 0

    def before(_: nn.Module, args: Any, kwargs: Any) -> None:
        nonlocal call, ends_at_input, first_node
        runs.gather(block)
        first_node = torch._C._autograd._get_sequence_nr()
        if torch.is_grad_enabled() and not block.in_backward:
            # On one device autograd runs the node that was made last first. So when the node of any input runs, the
            # backwards of all nodes that were made after it are over. Other inputs may still wait for gradients.
            nodes = _nodes((args, kwargs), block.params[0].device)
            this = call = object()
            ends_at_input = bool(nodes)
            for node in nodes:
                node.register_prehook(lambda _: runs.leave_backward(block, this))

    def after(_: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if torch.is_grad_enabled():
            this, has_end_hook = call, ends_at_input
            nodes = _nodes(output)
            # the node of an input that is returned as it is runs only when the backward of this block is over
            made_here = [node for node in nodes if node._sequence_nr() >= first_node]

            def enter(_: Any) -> None:
                runs.enter_backward(block, this)
                if not has_end_hook:  # the callback runs at the end of this backward, which may be inside another
                    torch.autograd.Variable._execution_engine.queue_callback(lambda: runs.leave_backward(block, this))

            for node in made_here or sorted(nodes, key=lambda node: node._sequence_nr())[-1:]:
                node.register_prehook(enter)
        block.after_forward()
        runs.after_release()

    module.register_forward_pre_hook(ModuleHook(module, uncompiled(before)), with_kwargs=True, prepend=True)
    module.register_forward_hook(ModuleHook(module, uncompiled(after)), with_kwargs=True)


def _nodes(nest: Any, device: torch.device | None = None) -> list[Node]:
    """Return the autograd nodes of the tensors of a nest (on one device), and of the tensors that these are views of.

    An in-place function that follows takes the view's own node out of the graph.
    """
    with torch._C.DisableTorchFunctionSubclass():
        on_device = [tensor for _, tensor in tensors(nest) if device is None or tensor.device == device]
        with_bases = [*on_device, *(tensor._base for tensor in on_device if tensor._base is not None)]
        return [tensor.grad_fn for tensor in with_bases if tensor.grad_fn is not None]
