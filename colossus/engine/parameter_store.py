"""The parameters of a model as they are stored, and as compute sees them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from torch import nn

from colossus.context.parallel_context import ParallelContext
from colossus.engine.block_modules import by_block, run_around
from colossus.engine.sharded_block import ShardedBlock
from colossus.layers.pipeline_block import NamedBlock
from colossus.tensor_parallel.weight_store import WeightStore


class ParameterStore:
    """Between stored parameters, which the optimizer and checkpoints see, and those that compute sees.

    The two are the same until a strategy asks for `shard`. From then on ``model.parameters()`` are a rank's rows of
    them, and the blocks of the model gather theirs while they run. What belongs to no block, or to several, is the root
    block's, which is gathered for a whole step or evaluation.

    Tensor parallelism moves what is gathered here: that is the work of ``weights``.

    Args:
        model: of this rank.
        chain: gives the blocks of the model on this rank, None where it is no chain of them.
        weights: of the model's layers.
    """

    def __init__(
        self,
        model: nn.Module,
        context: ParallelContext,
        weights: WeightStore,
        chain: Callable[[], Sequence[NamedBlock] | None],
    ) -> None:
        self.weights = weights
        self._model, self._context, self._chain = model, context, chain
        self._blocks: list[ShardedBlock] = []
        self._root: ShardedBlock | None = None
        self._block_of: dict[int, ShardedBlock] = {}
        #: ids of parameters whose gradients are complete in this step
        self._complete: set[int] = set()
        self._stored = list(model.parameters())

    def parameters(self) -> list[nn.Parameter]:
        """All parameters of this rank as they are stored, in the model's order."""
        return list(self._stored)

    def trainable(self) -> list[nn.Parameter]:
        """Those of them that get a gradient."""
        return [param for param in self._stored if param.requires_grad]

    def stored(self, param: nn.Parameter) -> nn.Parameter:
        """As what a parameter that compute sees is stored."""
        block = self._block_of.get(id(param))
        return param if block is None else block.stored(param)

    def shard(self, axes: Iterable[str]) -> None:
        """Store every parameter in rows cut over these axes; scalars, which have none, stay as they are.

        The gradient of a parameter that compute sees is then summed on each rank over the step: `start_scatter` and
        `finish_scatter` make that of the stored parameter from it. Collective, as are all forwards from then on.
        """
        assert not self._blocks, "the parameters are sharded already"
        group = self._context.group(tuple(axes))
        if group.size == 1:
            return
        blocks, root = by_block(self._model, self._chain())
        for module, held in blocks:
            block = ShardedBlock(held, group, self._context, self.weights.scope)
            run_around(module, block)
            self._blocks.append(block)
        if root:
            self._root = ShardedBlock(root, group, self._context, "step")
            self._blocks.append(self._root)
            self._model.register_forward_pre_hook(lambda *_: self.gather_root(), prepend=True)
        self._block_of = {id(param): block for block in self._blocks for param in block.params}
        self._stored = list(self._model.parameters())

    # -- a step or an evaluation --------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Drop the gradients of the step before, also those of parameters that the engine's optimizer does not have."""
        self.release()
        for param in self._stored:
            param.grad = None
        self.weights.begin_step()

    def gather_root(self) -> None:
        """Before a stage runs: what its blocks do not gather themselves."""
        if self._root is not None:
            self._root.gather()

    def after_backward(self) -> None:
        """A stage's backward is over, also of blocks whose inputs get no gradient."""
        for block in self._blocks:
            block.leave_backward()

    def start_scatter(self, params: Iterable[nn.Parameter]) -> None:
        """Sum and scatter the gradients of the blocks that are complete with these parameters, as compute sees them."""
        params = [param for param in params if id(param) in self._block_of]
        self._complete.update(map(id, params))
        for block in dict.fromkeys(self._block_of[id(param)] for param in params):
            if all(id(param) in self._complete for param in block.params):
                block.start_scatter()

    def finish_scatter(self) -> None:
        """Wait for what `start_scatter` has started."""
        self._complete.clear()
        for block in self._blocks:
            block.finish_scatter()

    def end_step(self) -> None:
        """All backwards are done: reduce the gradients that are left in layers, and free what is gathered."""
        self.weights.end_step()
        for block in self._blocks:
            block.end_step()

    def abandon_step(self) -> None:
        """Forget a step that failed, without a collective."""
        self.weights.abandon_step()
        self._complete.clear()
        for block in self._blocks:
            block.abandon()

    def release(self) -> None:
        """Free what is gathered."""
        for block in self._blocks:
            block.release()
