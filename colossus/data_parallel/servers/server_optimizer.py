"""The optimizer of the servers: that of the engine, whose rules and state are there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from colossus.context.parallel_context import ParallelContext
from colossus.data_parallel.options.server_options import SERVER_OPTIMIZERS
from colossus.data_parallel.servers.server_shards import ServerShard
from colossus.layout.parameter import spec_of
from colossus.server.client import Servers
from colossus.server.sharding import TensorState
from colossus.sparse.table_optimizers import row_rule


class ServerOptimizer:
    """The engine's optimizer has the parameter groups and their options, which go with each update. What it keeps for
    each parameter is given to the servers when these begin, and is taken from them for a checkpoint.

    Raises:
        ValueError: the servers do not know it.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, context: ParallelContext) -> None:
        self._optimizer, self._context = optimizer, context
        for group in optimizer.param_groups:
            if not group["params"]:
                continue
            if row_rule(optimizer, group) is None or group.get("amsgrad"):
                what = f"{type(optimizer).__name__} with amsgrad" if group.get("amsgrad") else type(optimizer).__name__
                raise ValueError(
                    f"strategy 'server': the servers cannot apply {what}; they know {', '.join(SERVER_OPTIMIZERS)} of "
                    f"torch. Any other is a worker's own, with algorithm = 'downpour' or 'easgd'"
                )
            if group.get("row_rule") == "rowwise_adagrad":
                self._require_whole_rows(group)

    def _require_whole_rows(self, group: Mapping[str, Any]) -> None:
        for param in group["params"]:
            if self._context.size(spec_of(param).layout.dims[1]) > 1:
                raise ValueError(
                    f"{spec_of(param).name}: rowwise_adagrad needs the squares of whole rows, but ranks have parts of "
                    f"its features, which are tensors of their own at the servers; take adagrad"
                )

    def _groups(self) -> dict[int, dict[str, Any]]:
        """The parameter group of each parameter, by id."""
        return {id(param): group for group in self._optimizer.param_groups for param in group["params"]}

    def updated(self, shards: Sequence[ServerShard]) -> list[ServerShard]:
        """Those of them that it updates."""
        groups = self._groups()
        return [shard for shard in shards if id(shard.param) in groups]

    def rule_of(self, shard: ServerShard) -> str:
        """The name of its rule."""
        rule = row_rule(self._optimizer, self._groups()[id(shard.param)])
        assert rule is not None, "checked when it was made"
        return rule.name

    def options_of(self, shards: Sequence[ServerShard], **more: Any) -> dict[str, dict[str, Any]]:
        """By name of the tensors the options of its rules as they are now, and ``more``."""
        groups, found = self._groups(), {}
        made: dict[int, dict[str, Any]] = {}
        for shard in shards:
            group = groups[id(shard.param)]
            if id(group) not in made:
                rule = row_rule(self._optimizer, group)
                assert rule is not None
                given = {key: group[key] for key in rule.options if key in group}
                made[id(group)] = {key: _plain(value) for key, value in given.items()} | more
            found[shard.name] = made[id(group)]
        return found

    # -- state ------------------------------------------------------------------------------------------------

    def give_state(self, servers: Servers, shards: Sequence[ServerShard], names: set[str]) -> None:
        """Give the servers what is kept of the tensors ``names``, and forget it here, of all shards."""
        state = self._optimizer.state
        states = {shard.name: _tensor_state(shard, state[shard.param]) for shard in shards if shard.param in state}
        states = {name: kept for name, kept in states.items() if name in names and (kept.rows or kept.scalars)}
        if states:
            servers.load_state(states).wait()
        for shard in shards:
            state.pop(shard.param, None)

    @torch.no_grad()
    def state(self, servers: Servers, shards: Sequence[ServerShard]) -> Mapping[Any, Mapping[str, Any]]:
        """What the servers keep, as the optimizer of torch would keep it."""
        found: dict[Any, dict[str, Any]] = {}
        states = servers.state([shard.name for shard in shards]).wait()
        for shard in shards:
            param = shard.param
            of_param = found.setdefault(param, {})
            for key, rows in states[shard.name].rows.items():
                if key == "value":
                    continue
                if key not in of_param:
                    shape = (*param.shape[:1], *rows.shape[1:])
                    of_param[key] = torch.zeros(shape, dtype=rows.dtype, device=param.device)
                local = shard.local(of_param[key])
                local.copy_(rows.view(local.shape))
            of_param.update({key: torch.tensor(value) for key, value in states[shard.name].scalars.items()})
        return {param: of_param for param, of_param in found.items() if of_param}


def _tensor_state(shard: ServerShard, kept: Mapping[str, Any]) -> TensorState:
    """What an optimizer of torch keeps for a parameter: of each row, or once (``step``)."""
    rows: dict[str, Tensor] = {}
    scalars: dict[str, float] = {}
    for key, value in kept.items():
        if value is None:
            continue
        if key == "step":
            scalars[key] = float(value)
        else:
            local = shard.local(value).detach().cpu()
            rows[key] = local if local.dim() else local.view(1)
    return TensorState(rows, scalars)


def _plain(value: Any) -> Any:
    """As JSON has it."""
    if isinstance(value, Tensor):
        return value.item()
    return list(value) if isinstance(value, tuple) else value
