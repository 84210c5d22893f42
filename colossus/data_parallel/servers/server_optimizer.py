"""The engine's optimizer, whose rules are applied and whose state is kept at the servers."""

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
    """The engine's optimizer, as the servers apply it.

    It has the parameter groups and their options, which are sent with each update. Its state goes to the servers when
    these begin, and is fetched from them for a checkpoint.

    Raises:
        ValueError: the servers cannot apply this optimizer.
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
                    f"torch. With algorithm = 'downpour' or 'easgd' each worker has an optimizer of its own, of any"
                    f" class"
                )
            if group.get("row_rule") == "rowwise_adagrad":
                self._require_whole_rows(group)

    def _require_whole_rows(self, group: Mapping[str, Any]) -> None:
        for param in group["params"]:
            if self._context.size(spec_of(param).layout.dims[1]) > 1:
                raise ValueError(
                    f"{spec_of(param).name}: rowwise_adagrad needs the squares of whole rows, but ranks have parts of "
                    f"its features, which are separate tensors at the servers; use adagrad"
                )

    def _groups(self) -> dict[int, dict[str, Any]]:
        """Return the parameter group of each parameter, by the parameter's id."""
        return {id(param): group for group in self._optimizer.param_groups for param in group["params"]}

    def updated(self, shards: Sequence[ServerShard]) -> list[ServerShard]:
        """Return those of the shards that the optimizer updates."""
        groups = self._groups()
        return [shard for shard in shards if id(shard.param) in groups]

    def rule_of(self, shard: ServerShard) -> str:
        """Return the name of the rule that updates a shard."""
        rule = row_rule(self._optimizer, self._groups()[id(shard.param)])
        assert rule is not None, "checked when it was made"
        return rule.name

    def options_of(self, shards: Sequence[ServerShard], **more: Any) -> dict[str, dict[str, Any]]:
        """Return for each shard, by name, the present options of its rule, and ``more``."""
        groups, by_name = self._groups(), {}
        by_group: dict[int, dict[str, Any]] = {}
        for shard in shards:
            group = groups[id(shard.param)]
            if id(group) not in by_group:
                rule = row_rule(self._optimizer, group)
                assert rule is not None
                options = {key: _plain(group[key]) for key in rule.options if key in group}
                by_group[id(group)] = options | more
            by_name[shard.name] = by_group[id(group)]
        return by_name

    # -- state ------------------------------------------------------------------------------------------------

    def move_state(self, servers: Servers, shards: Sequence[ServerShard], names: set[str]) -> None:
        """Send the state of the tensors ``names`` to the servers, and drop that of all shards here."""
        state = self._optimizer.state
        states = {shard.name: _tensor_state(shard, state[shard.param]) for shard in shards if shard.param in state}
        states = {name: entry for name, entry in states.items() if name in names and (entry.rows or entry.scalars)}
        if states:
            servers.load_state(states).wait()
        for shard in shards:
            state.pop(shard.param, None)

    @torch.no_grad()
    def state(self, servers: Servers, shards: Sequence[ServerShard]) -> Mapping[Any, Mapping[str, Any]]:
        """Return the servers' state in the form of torch's optimizer."""
        state: dict[Any, dict[str, Any]] = {}
        states = servers.state([shard.name for shard in shards]).wait()
        for shard in shards:
            param = shard.param
            of_param = state.setdefault(param, {})
            for key, rows in states[shard.name].rows.items():
                if key == "value":
                    continue
                if key not in of_param:
                    shape = (*param.shape[:1], *rows.shape[1:])
                    of_param[key] = torch.zeros(shape, dtype=rows.dtype, device=param.device)
                local = shard.local(of_param[key])
                local.copy_(rows.view(local.shape))
            of_param.update({key: torch.tensor(value) for key, value in states[shard.name].scalars.items()})
        return {param: of_param for param, of_param in state.items() if of_param}


def _tensor_state(shard: ServerShard, state: Mapping[str, Any]) -> TensorState:
    """Return a shard's part of the state that an optimizer of torch keeps for its parameter."""
    rows: dict[str, Tensor] = {}
    scalars: dict[str, float] = {}
    for key, value in state.items():
        if value is None:
            continue
        if key == "step":
            scalars[key] = float(value)
        else:
            local = shard.local(value).detach().cpu()
            rows[key] = local if local.dim() else local.view(1)
    return TensorState(rows, scalars)


def _plain(value: Any) -> Any:
    """Return an option as a value of JSON."""
    if isinstance(value, Tensor):
        return value.item()
    return list(value) if isinstance(value, tuple) else value
