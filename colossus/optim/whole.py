"""An optimizer of any class on whole parameters: each parameter at the rank that owns it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import reduce
from typing import Any

import torch
from torch import nn

from colossus.optim.logical_tensors import Holders, LogicalTensor
from colossus.optim.owner_exchange import Exchange, choose_owners
from colossus.optim.torch_classes import groups_of


class WholeParameters(torch.optim.Optimizer):
    """An optimizer that needs whole parameters (norms of layers, factored moments, Shampoo, SOAP).

    The run is the same under every plan, and the optimizer's class knows nothing of plans. Each logical parameter has
    an owner (query, key, value and the matrices of experts are separate); ranks own about equally many elements. In a
    step gradients and values are sent to the owners, whose optimizers step, and the values are sent back:
    `Exchange.bytes_sent`, the first part twice. Only the owner has state, so all ranks together have as much as one
    process. An owner has values and gradients of its tensors whole.

    Args:
        params: stored parameters, or groups of them.
        holders: the ranks that store them.
        make: makes the optimizer from a list of groups: dicts of options, with whole tensors as ``params``.

    Attributes:
        inner: optimizer of the tensors that this rank owns.
        tensor_state: its state, by name.
    """

    def __init__(
        self, params: Iterable[Any], holders: Holders, make: Callable[[list[dict[str, Any]]], torch.optim.Optimizer]
    ) -> None:
        groups = groups_of(params)
        tensors_of_groups = [holders.tensors(group["params"]) for group in groups]
        self._tensors: list[LogicalTensor] = [tensor for tensors in tensors_of_groups for tensor in tensors]
        self._device = holders.context.device
        self._dtype = reduce(torch.promote_types, (tensor.parameter.dtype for tensor in self._tensors))
        owners = choose_owners([tensor.numel for tensor in self._tensors], holders.group.size)
        self.exchange = Exchange(self._tensors, owners, holders)
        whole = {k: self._parameter(self._tensors[k].shape) for k in self.exchange.owned}
        self._owned = [(self._tensors[k], param) for k, param in whole.items()]
        #: parameters that fill empty groups: an optimizer that counts steps in a group must count alike on all ranks
        self._fillers: list[nn.Parameter] = []
        inner_groups, first = [], 0
        for group, tensors in zip(groups, tensors_of_groups, strict=True):
            numbers = range(first, first + len(tensors))
            mine = [whole[k] for k in numbers if k in whole]
            first += len(tensors)
            if not mine:
                self._fillers.append(self._parameter((2, 2)))
                mine = [self._fillers[-1]]
            inner_groups.append({**group, "params": mine})
        self.inner = make(inner_groups)
        if len(self.inner.param_groups) != len(groups):
            raise ValueError(
                f"{type(self.inner).__name__} made {len(self.inner.param_groups)} groups of the {len(groups)} that it "
                f"received: it cannot run on whole parameters (optimizer.whole)"
            )
        pairs = zip(self.inner.param_groups, groups, strict=True)
        made = [{**_options(new), "params": group["params"]} for new, group in pairs]
        super().__init__(made, {})

    def _parameter(self, shape: tuple[int, ...]) -> nn.Parameter:
        return nn.Parameter(torch.zeros(shape, dtype=self._dtype, device=self._device))

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Step all parameters that have a gradient. Collective over the ranks that store them."""
        values = [tensor.local(tensor.parameter.detach()) for tensor in self._tensors]
        grads = [
            torch.zeros_like(value) if tensor.parameter.grad is None else tensor.local(tensor.parameter.grad)
            for tensor, value in zip(self._tensors, values, strict=True)
        ]
        coming = [self.exchange.to_owners([x.to(self._device, self._dtype) for x in xs]) for xs in (values, grads)]
        for (tensor, whole), value, grad in zip(self._owned, *(wait() for wait in coming), strict=True):
            whole.copy_(value)
            whole.grad = None if tensor.parameter.grad is None else grad
        for filler in self._fillers:
            filler.grad = torch.zeros_like(filler)
        for group, inner in zip(self.param_groups, self.inner.param_groups, strict=True):
            inner.update(_options(group))
        self.inner.step()
        for group, inner in zip(self.param_groups, self.inner.param_groups, strict=True):
            group.update(_options(inner))
        new = [whole.detach() for _, whole in self._owned]
        back = self.exchange.to_holders(new, torch.empty(0, dtype=self._dtype, device=self._device))
        for value, part in zip(values, back(), strict=True):
            value.copy_(part)

    # -- checkpoints --------------------------------------------------------------------------------------

    @property
    def tensor_state(self) -> dict[str, dict[str, Any]]:
        """State of the inner optimizer for each tensor, by name."""
        return {tensor.name: self.inner.state.get(whole, {}) for tensor, whole in self._owned}

    def state_tensors(self) -> list[tuple[LogicalTensor, bool]]:
        """Return the tensors whose state this rank has, and that it saves them."""
        return [(tensor, True) for tensor, _ in self._owned]

    def load_tensor_state(self, state: dict[str, dict[str, Any]]) -> None:
        self.inner.state.clear()
        for tensor, whole in self._owned:
            if tensor.name in state:
                self.inner.state[whole] = state[tensor.name]


def _options(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}
