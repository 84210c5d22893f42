"""The order in which the blocks of a model run: each is gathered while the one before it runs."""

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
    """Gathers blocks as they run, and starts the gather of the next one: at most one block ahead.

    Which is next is what came next the last time, in forwards and in backwards apart; for the first backward, the order
    of forward reversed. All ranks that share rows run the same blocks in the same order, and so guess alike: where a
    block comes that was not expected, what was started for another is waited for and dropped on all of them.

    Attributes:
        on_backward: called with a block whose backward is over, before it is let go.
        is_running: whether a step or an evaluation is.
    """

    def __init__(self) -> None:
        self.on_backward: Callable[[ShardedBlock], None] = lambda block: None
        self.is_running = False
        #: block, whether in backward -> the block gathered after it
        self._next: dict[tuple[ShardedBlock, bool], ShardedBlock] = {}
        self._last: tuple[ShardedBlock, bool] | None = None
        #: whose gather has been started ahead
        self._ahead: ShardedBlock | None = None
        #: to be started when the block that ran before has been let go
        self._waiting: ShardedBlock | None = None
        self._in_backward: list[ShardedBlock] = []

    def begin(self) -> None:
        """A forward or backward of a stage begins: what ran before says nothing about what comes."""
        self._last = self._waiting = None
        self._drop_ahead()

    def gather(self, block: ShardedBlock) -> None:
        """Make a block whole, and start the gather of the next one."""
        if block.is_whole:
            block.gather()  # for a user's code that has let the modules hold other parameters
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
        """A block may have been let go: there is room for the next."""
        if self._waiting is None or any(block.frees_after_forward for block in self._in_backward[:-1]):
            return
        self._ahead, self._waiting = self._waiting, None
        self._ahead.start_gather()

    def enter_backward(self, block: ShardedBlock, call: object) -> None:
        """The backward of one forward of a block begins."""
        if call not in block.in_backward:
            block.in_backward.append(call)
        # with create_graph: what runs the backward of this backward is not seen here
        block.is_kept = block.is_kept or torch.is_grad_enabled()
        if block in self._in_backward:
            self._in_backward.remove(block)
        self._in_backward.append(block)
        self.gather(block)

    def leave_backward(self, block: ShardedBlock, call: object) -> None:
        """The backward of one forward of a block is over, if it had begun and was not over before."""
        if call not in block.in_backward:
            return
        is_last = len(block.in_backward) == 1  # else, of a block that runs twice in a row, the one before has begun
        if is_last:
            self._in_backward.remove(block)
            self.on_backward(block)
        block.after_backward(call)
        if is_last:
            self.after_release()

    def leave_all(self) -> None:
        """A stage's backward is over, also of blocks whose inputs get no gradient."""
        for block in list(self._in_backward):
            for call in list(block.in_backward):
                self.leave_backward(block, call)

    def reset(self) -> None:
        """A step or an evaluation is over: nothing that was started for it is used after it."""
        self._last = self._ahead = self._waiting = None
        self._in_backward.clear()

    def _drop_ahead(self) -> None:
        if self._ahead is not None:
            self._ahead.drop_gather()
        self._ahead = None


class ModuleHook:
    """A hook of ZeRO on a user's module. A copy of the module has it, too, and so is refused when it is called: its
    parameters are rows that nothing gathers. A pickle is refused.
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
        f"{what}: this rank has rows of its parameters. Take colossus.plain(engine), which is the model in one "
        f"process, or save a checkpoint (engine.checkpoints.save)"
    )


def run_around(module: nn.Module, block: ShardedBlock, runs: BlockRuns) -> None:
    """Gather a block that is freed within a step before its module's forward and backward, and let it go after each."""
    #: of the last forward: what stands for it, whether the gradients of its inputs tell that its backward is over, and
    #: the number of the first node that it makes
    call, is_left_by_input, first_node = object(), False, 0

    def before(_: nn.Module, args: Any, kwargs: Any) -> None:
        nonlocal call, is_left_by_input, first_node
        runs.gather(block)
        first_node = torch._C._autograd._get_sequence_nr()
        if torch.is_grad_enabled() and not block.in_backward:
            # On one device autograd runs what was made last first: when what made any of the inputs runs, the backward
            # of all that was made after it is over. Gradients of the other inputs may still be awaited from elsewhere.
            nodes = _nodes((args, kwargs), block.params[0].device)
            this = call = object()
            is_left_by_input = bool(nodes)
            for node in nodes:
                node.register_prehook(lambda _: runs.leave_backward(block, this))

    def after(_: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if torch.is_grad_enabled():
            this, is_seen = call, is_left_by_input
            nodes = _nodes(output)
            # not what made an input that is returned as it is: it runs when the backward of this block is over
            made_here = [node for node in nodes if node._sequence_nr() >= first_node]

            def enter(_: Any) -> None:
                runs.enter_backward(block, this)
                if not is_seen:  # at the end of this backward, which may be inside of another
                    torch.autograd.Variable._execution_engine.queue_callback(lambda: runs.leave_backward(block, this))

            for node in made_here or sorted(nodes, key=lambda node: node._sequence_nr())[-1:]:
                node.register_prehook(enter)
        block.after_forward()
        runs.after_release()

    module.register_forward_pre_hook(ModuleHook(module, uncompiled(before)), with_kwargs=True, prepend=True)
    module.register_forward_hook(ModuleHook(module, uncompiled(after)), with_kwargs=True)


def _nodes(nest: Any, device: torch.device | None = None) -> list[Node]:
    """Return what made the tensors of a nest (on one device), whatever types these are, and what these are views of: an
    in-place function that follows takes the view's own node out of the graph.
    """
    with torch._C.DisableTorchFunctionSubclass():
        found = [tensor for _, tensor in tensors(nest) if device is None or tensor.device == device]
        made = [*found, *(tensor._base for tensor in found if tensor._base is not None)]
        return [tensor.grad_fn for tensor in made if tensor.grad_fn is not None]
