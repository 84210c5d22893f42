"""The routers of a run: what of all tokens of a step went where, and the biases that balance it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from colossus.comm import collectives
from colossus.data_parallel.strategy import Strategy
from colossus.layers.model_parallel import model_parallel_of
from colossus.layers.router import SUMS, Router


def routers_of(model: nn.Module) -> dict[str, int]:
    """Name -> number of experts of each router of a whole model."""
    return {name: each.num_experts for name, each in model.named_modules() if isinstance(each, Router)}


class Routers:
    """Sums what the routers of all ranks have counted in a step, and moves their biases.

    Args:
        sizes: of the whole model, as of `routers_of`, also of stages of other ranks.
        model: of this rank.

    Attributes:
        data_group: the ranks along data that share the experts: all of them run the same forwards.
    """

    def __init__(self, sizes: dict[str, int], model: nn.Module, strategy: Strategy) -> None:
        self.sizes = sizes
        found = {name: each for name, each in model.named_modules() if isinstance(each, Router)}
        #: without those of other stages, whose parameters a pipeline has taken away
        self._own = {name: each for name, each in found.items() if each._parameters.get("weight") is not None}
        context, axes = strategy.parts.context, strategy.summed_axes
        self._group, self._device = context.group(axes), context.device
        data, grid = context.grid.axes("data"), context.grid
        self.data_group = context.group(tuple(axis for axis in grid.expert_axes if axis in data and sizes))
        apart = ("pipeline", *model_parallel_of(context).regions.whole.shard_axes)
        # ranks that hold the same tokens count the same: the first of them does
        self._counts = all(context.coordinates[axis] == 0 for axis in axes if axis not in apart)

    def begin_step(self) -> None:
        for router in self._own.values():
            router.totals = None

    @torch.no_grad()
    def end_step(self, skipped: Tensor | None) -> Tensor | None:
        """Collective, at the end of a step, over the ranks whose gradients are summed. No host waits.

        Args:
            skipped: whether the step changes nothing, bool scalar; None: it does.

        Returns:
            Of each router of the whole model, one behind the other: `Router.totals`. None where there is no router.
        """
        if not self.sizes:
            return None
        parts = []
        for name, num_experts in self.sizes.items():
            totals = self._own[name].totals if name in self._own and self._counts else None
            zeros = torch.zeros(num_experts + len(SUMS), dtype=torch.float64, device=self._device)
            parts.append(zeros if totals is None else totals)
        sums = collectives.all_reduce(torch.cat(parts), self._group, owned=True, what="routers").wait()
        widths = [num_experts + len(SUMS) for num_experts in self.sizes.values()]
        for (name, num_experts), totals in zip(self.sizes.items(), sums.split(widths), strict=True):
            router = self._own.get(name)
            if router is not None and router.bias is not None:
                counts = totals[:num_experts]
                step = router.bias_update * (counts.mean() - counts).sign()
                router.bias += step if skipped is None else step * ~skipped
        return sums
