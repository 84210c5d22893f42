"""The routers of a run: counts over all tokens of a step, and the biases that balance them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from colossus.comm import collectives
from colossus.data_parallel.strategy import Strategy
from colossus.layers.model_parallel import model_parallel_of
from colossus.layers.router import SUMS, Router


def routers_of(model: nn.Module) -> dict[str, int]:
    """Return the number of experts of each router of a whole model, by name."""
    return {name: module.num_experts for name, module in model.named_modules() if isinstance(module, Router)}


class Routers:
    """The sums of the routers' counts over all ranks in a step, and the update of their biases.

    Args:
        sizes: routers of the whole model (`routers_of`), also of other ranks' stages.
        model: the rank's part of the model.
        strategy: the data-parallel strategy.

    Attributes:
        data_group: the ranks along data that share the experts; all of them run the same forwards.
    """

    def __init__(self, sizes: dict[str, int], model: nn.Module, strategy: Strategy) -> None:
        self.sizes = sizes
        routers = {name: module for name, module in model.named_modules() if isinstance(module, Router)}
        #: routers of this rank's stages; a pipeline removes the parameters of others
        self._own = {name: router for name, router in routers.items() if router._parameters.get("weight") is not None}
        context, axes = strategy.parts.context, strategy.summed_axes
        self._group, self._device = context.group(axes), context.device
        data, grid = context.grid.axes("data"), context.grid
        self.data_group = context.group(tuple(axis for axis in grid.expert_axes if axis in data and sizes))
        apart = ("pipeline", *model_parallel_of(context).regions.whole.shard_axes)
        # ranks with the same tokens have the same counts: the first of them adds its own
        self._counts = all(context.coordinates[axis] == 0 for axis in axes if axis not in apart)

    def begin_step(self) -> None:
        for router in self._own.values():
            router.totals = None

    @torch.no_grad()
    def end_step(self, skipped: Tensor | None) -> Tensor | None:
        """Sum the counts at the end of a step. Collective over the ranks whose gradients are summed; no host waits.

        Args:
            skipped: whether the step changes nothing, bool scalar; None: it changes parameters.

        Returns:
            `Router.totals` of each router of the whole model, one after the other; None if there is no router.
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
            if router is not None and router.bias is not None and router.bias_update:
                counts = totals[:num_experts]
                step = router.bias_update * (counts.mean() - counts).sign()
                router.bias += step if skipped is None else step * ~skipped
        return sums
