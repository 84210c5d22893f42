"""Sums of gradients that are exact, so that their bits depend on no order, and on no plan.

Under ``train.reproducible`` each sample is a microbatch. The gradient of a sample has the same bits under every plan
that supports it. Here these gradients are added over samples and ranks as fixed-point numbers: float64 multiples of a
fixed step, of which sums are exact as long as they have at most 53 bits. A gradient is cut in two such numbers, which
keep all bits of float32 down to 2^-42. (The pre-rounding of reproducible sums, Demmel and Nguyen, 2013, with fixed bins
in place of those around the largest addend, which no rank would know in time.)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Sequence

import torch
from torch import Tensor, nn

from colossus.comm import collectives
from colossus.context.groups import AxisGroup
from colossus.error_place import located_error
from colossus.gradients.gradient_axes import agree_on_axes, gradient_sum_axes
from colossus.gradients.reduction import ModelParts
from colossus.layout.parameter import spec_of
from colossus.tensor_parallel.dtypes import gradient_dtype

#: the high number of a gradient is a multiple of 2^-24: its sums are exact below 2^29
_HIGH = 2.0**24
_MOST = 2.0**29
#: the low one, at most 2^-25, of 2^-65: its sums are exact for 2^13 addends, two (a tied weight's) of each of the most
#: samples (`colossus.config.reproducible.MAX_SAMPLES`)
_LOW = 2.0**65


class OrderFreeGradients:
    """The sums of a step's gradients over microbatches and ranks, exact in any order.

    After each backward `take` moves the gradients of its microbatch into the sums. At the end `finish` sums over ranks;
    then one rank has the sum as its gradient, and the others have zeros, so that any strategy that adds them up, in
    whatever order, gets the sum.

    Args:
        parts: the model of this rank.
        shared: ids of the parameters that several modules use. The gradient of each of these products is an addend of
            its own, as they may be on different pipeline ranks.
    """

    def __init__(self, parts: ModelParts, shared: Container[int]) -> None:
        self._parts, self._shared = parts, shared
        params = [param for params in parts.parameters_by_stage.values() for param in params]
        self._params = [param for param in params if param.requires_grad]
        self._undecided = [param for param in self._params if not spec_of(param).is_decided]
        #: id of a parameter -> its sums, float64 [2, elements], and whether a rank has added to them
        self._sums: dict[int, Tensor] = {}
        self._used: set[int] = set()
        #: id of a tied parameter -> the pipeline ranks that hold it
        self._stages_of = {id(param): parts.context.subgroup("pipeline", sorted(ranks)) for param, ranks in parts.tied}

    def takes(self, param: Tensor) -> bool:
        """Return whether the gradients of a parameter's products are passed to `add`, and not to autograd."""
        return id(param) in self._shared

    def take(self) -> None:
        """Move the gradients that a backward has made into the sums."""
        for param in self._params:
            if param.grad is not None:
                self.add(param, param.grad)
                param.grad = None

    @torch.no_grad()
    def add(self, param: Tensor, gradient: Tensor) -> None:
        """Add one gradient of a parameter to its sums."""
        high, low = self._sums_of(param, gradient.numel())
        value = gradient.reshape(-1).double()
        rounded = (value * _HIGH).round_().div_(_HIGH)
        high.add_(rounded)
        low.add_((value - rounded).mul_(_LOW).round_().div_(_LOW))
        self._used.add(id(param))

    def _sums_of(self, param: Tensor, size: int) -> Tensor:
        if (sums := self._sums.get(id(param))) is None:
            sums = self._sums[id(param)] = torch.zeros(2, size, dtype=torch.float64, device=param.device)
        return sums

    @torch.no_grad()
    def finish(self) -> None:
        """Sum over ranks, and set the gradients. Collective; called where split parameters are shards.

        Raises:
            ValueError: tensor ranks have different parts of the gradient of a whole parameter.
        """
        context = self._parts.context
        self._undecided = agree_on_axes(self._undecided, context)
        tensor = set(context.grid.axes("tensor"))
        over_axes: dict[AxisGroup, list[nn.Parameter]] = {}
        over_stages: dict[AxisGroup, list[nn.Parameter]] = {}
        for param in self._params:
            axes = gradient_sum_axes(param, context)
            if tensor.intersection(axes):
                raise located_error(
                    f"train.reproducible = 'plan': the gradient of {spec_of(param).name} is a sum over tensor ranks of "
                    f"addends that depend on their number (of each rank's heads, for example): use parallel.tensor = 1"
                )
            over_axes.setdefault(context.state_group(axes), []).append(param)
            if (stages := self._stages_of.get(id(param))) is not None:
                over_stages.setdefault(stages, []).append(param)
        for group, params in (*over_axes.items(), *over_stages.items()):
            self._sum(group, params)
        for param in self._params:
            self._set_gradient(param)
        for sums in self._sums.values():
            sums.zero_()
        self._used.clear()

    def _sum(self, group: AxisGroup, params: Sequence[nn.Parameter]) -> None:
        """Sum the numbers of parameters over a group, one by one, and tell whether any rank has used each."""
        if group.size == 1:
            return
        flags = torch.tensor([float(id(param) in self._used) for param in params], dtype=torch.float64)
        used = collectives.all_reduce(flags.to(params[0].device), group, owned=True).wait().tolist()
        for param, flag in zip(params, used, strict=True):
            if flag:
                sums = self._sums_of(param, param.numel())
                self._sums[id(param)] = collectives.all_reduce(sums, group, owned=True).wait()
                self._used.add(id(param))

    def _set_gradient(self, param: nn.Parameter) -> None:
        if id(param) not in self._used:
            return
        context = self._parts.context
        group, stages = context.group(gradient_sum_axes(param, context)), self._stages_of.get(id(param))
        is_first = group.index == 0 and (stages is None or stages.index == 0)
        high, low = self._sums[id(param)]
        # sums that have lost bits count as not finite
        total = torch.where(high.abs() < _MOST, high + low, torch.inf).view(param.shape).to(gradient_dtype(param))
        param.grad = total if is_first else torch.zeros_like(total)


def shared_parameters(model: nn.Module, parts: ModelParts, stored: Callable[[nn.Parameter], nn.Parameter]) -> set[int]:
    """Return the ids of the parameters that several modules use, on this rank or on others.

    Args:
        stored: returns the parameter that modules have between steps for one that compute sees.
    """
    places = Counter(id(param) for _, param in model.named_parameters(remove_duplicate=False))
    params = [param for params in parts.parameters_by_stage.values() for param in params]
    return {id(param) for param in params if places[id(stored(param))] > 1} | {id(param) for param, _ in parts.tied}
