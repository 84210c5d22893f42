"""The trained parameters of a replica at the servers: made, pulled, pushed, and saved."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from colossus.comm import collectives
from colossus.comm.objects import all_gather_object
from colossus.engine.parts import ModelParts
from colossus.engine.sparse.row_update import row_rule
from colossus.engine.strategies.options.server import SERVER_OPTIMIZERS, ServerOptions
from colossus.engine.strategies.server_connection import connect
from colossus.engine.strategies.server_report import ServerReport
from colossus.engine.strategies.server_shards import ServerShard, SharedShards, server_shards
from colossus.rows.row_gradient import RowGradient
from colossus.server.handles import Handle
from colossus.server.tensor_state import TensorState

#: of one shard: its gradient, whole or of some rows
Gradient = Tensor | RowGradient | None


class Pull:
    """Values on their way to a rank. `wait` is collective in a replica of several ranks."""

    def __init__(
        self,
        handle: Handle[None],
        shards: Sequence[ServerShard],
        values: Sequence[Tensor],
        shared: SharedShards,
        waited: Callable[[float], None],
    ) -> None:
        self._handle, self._shards, self._values = handle, shards, list(values)
        self._shared, self._waited = shared, waited

    def wait(self) -> list[Tensor]:
        """Of each shard of this rank its values."""
        began = time.perf_counter()
        self._handle.wait()
        self._waited(time.perf_counter() - began)
        if self._shared:
            self._shared.take_first(self._shards, self._values)
        return self._values

    @torch.no_grad()
    def wait_into_parameters(self) -> None:
        """The parameters of this rank are these values."""
        for shard, value in zip(self._shards, self.wait(), strict=True):
            local = shard.local()
            if value.data_ptr() != local.data_ptr():
                local.copy_(value)


class ServerParameters:
    """What a rank has to do with the servers.

    Each box of a logical parameter is one tensor there. Of the ranks of a replica the first that holds a box pushes it
    and pulls it, and the others take what that one has pulled.

    Args:
        params: stored parameters that are trained.
        on_progress: called whenever something has moved.

    Attributes:
        shards: of this rank, those that the optimizer updates.
        is_placed: whether the servers have the parameters.
    """

    def __init__(
        self, options: ServerOptions, parts: ModelParts, params: Sequence[nn.Parameter], on_progress: Callable[[], None]
    ) -> None:
        self._options, self._context, self._params = options, parts.context, list(params)
        context = parts.context
        self.shards, self._sizes = server_shards(parts, params)
        self._shared = SharedShards(parts, self.shards, self._sizes)
        self._world, self._data = context.group(context.grid.names), context.group("data")
        self._connection = connect(options.servers, context, on_progress, self._data.ranks)
        self._servers = self._connection.servers
        self._optimizer: torch.optim.Optimizer | None = None
        self.is_placed = self._is_made = False
        self._begin: Sequence[Tensor] | None = None
        self._pushes: list[Handle[dict[str, int | None]]] = []
        self._clock: Handle[None] | None = None
        self._numbers = ServerReport(self._servers, is_logging=context.is_logging_rank)

    def take_optimizer(self, optimizer: torch.optim.Optimizer | None) -> None:
        """That which the servers apply; None: workers have their own.

        Raises:
            ValueError: the servers do not know it.
        """
        self._optimizer = optimizer
        for group in optimizer.param_groups if optimizer is not None else ():
            if group["params"] and (row_rule(optimizer, group) is None or group.get("amsgrad")):
                what = f"{type(optimizer).__name__} with amsgrad" if group.get("amsgrad") else type(optimizer).__name__
                raise ValueError(
                    f"strategy 'server': the servers cannot apply {what}; they know "
                    f"{', '.join(SERVER_OPTIMIZERS)} of torch. Any other is a worker's own, with "
                    f"algorithm = 'downpour' or 'easgd'"
                )
        if optimizer is not None:
            grouped = {id(param) for group in optimizer.param_groups for param in group["params"]}
            self.shards = [shard for shard in self.shards if id(shard.param) in grouped]

    @property
    def _first(self) -> list[ServerShard]:
        return [shard for shard in self.shards if shard.is_first]

    # -- making -------------------------------------------------------------------------------------------

    def begin_with(self, values: Sequence[Tensor] | None) -> None:
        """What `place` makes instead of the parameters, for each of these."""
        self._begin = values

    def forget(self) -> None:
        """The parameters were loaded: they are to be placed again."""
        self.is_placed = False

    @torch.no_grad()
    def place(self) -> None:
        """Let the servers have what the first replica has, unless they do: parameters, and the state of the optimizer,
        which is theirs from then on. Collective over all ranks."""
        if self.is_placed:
            return
        self.wait_for_pushes()
        begin = self._params if self._begin is None else self._begin
        value_of = {id(param): value.detach() for param, value in zip(self._params, begin, strict=True)}
        own = {shard.name: shard.local(value_of[id(shard.param)]).cpu() for shard in self._first}
        source_of, rule_of = self._sources_and_rules()
        names = [size.name for size in self._sizes if size.name in source_of]
        if self._is_made:
            self._servers.free(names).wait()
        sizes = {size.name: size for size in self._sizes}
        for source in sorted(set(source_of.values())):
            of_source = [name for name in names if source_of[name] == source]
            tensors = {
                name: own[name]
                if source == self._context.rank
                else torch.empty(sizes[name].shape, dtype=sizes[name].dtype, device="meta")
                for name in of_source
            }
            rules = {name: {"type": rule_of[name]} for name in of_source if rule_of[name]}
            self._servers.create(tensors, optimizers=rules, source=source).wait()
        self._load_optimizer({name for name, source in source_of.items() if source == self._context.rank})
        self.wait_for_all()
        self.is_placed, self._is_made, self._begin = True, True, None
        self._clock = None

    def _sources_and_rules(self) -> tuple[dict[str, int], dict[str, str | None]]:
        """Of each tensor the rank whose values count, and the rule of its optimizer."""
        is_source = self._data.index == 0
        own = [(shard.name, self._rule_of(shard)) for shard in self._first if is_source]
        source_of: dict[str, int] = {}
        rules: dict[str, str | None] = {}
        for rank, held in zip(self._world.ranks, all_gather_object(own, self._world), strict=True):
            for name, rule in held:
                source_of[name], rules[name] = rank, rule
        return source_of, rules

    def _rule_of(self, shard: ServerShard) -> str | None:
        if self._optimizer is None:
            return None
        rule = row_rule(self._optimizer, self._groups[id(shard.param)])
        assert rule is not None, "checked by take_optimizer"
        return rule.name

    @property
    def _groups(self) -> dict[int, dict[str, Any]]:
        """The parameter group of each parameter, by id."""
        if self._optimizer is None:
            return {}
        return {id(param): group for group in self._optimizer.param_groups for param in group["params"]}

    def wait_for_all(self) -> None:
        """Until all ranks have come here."""
        if self._world.size > 1:
            one = torch.zeros(1, device=self._context.device)
            collectives.all_reduce(one, self._world, owned=True).wait()

    # -- pulling --------------------------------------------------------------------------------------------

    def pull(self) -> Pull:
        """Start to pull the values of this rank's shards, into memory of their own."""
        values = [torch.empty_like(shard.local(), device="cpu") for shard in self.shards]
        into = {shard.name: value for shard, value in zip(self.shards, values, strict=True) if shard.is_first}
        return self._coming(self._servers.pull(into), values, into)

    def _coming(self, handle: Handle[None], values: Sequence[Tensor], into: Mapping[str, Tensor]) -> Pull:
        self._numbers.pulled(sum(value.nbytes for value in into.values()))
        return Pull(handle, self.shards, values, self._shared, self._numbers.waited)

    def whole(self, values: Sequence[Tensor]) -> list[Tensor]:
        """Values of shards as tensors of the shape of each parameter; what servers do not have is as it is here."""
        found = {id(param): param.detach().clone() for param in self._params}
        for shard, value in zip(self.shards, values, strict=True):
            shard.local(found[id(shard.param)]).copy_(value)
        return [found[id(param)] for param in self._params]

    # -- synchronous steps ------------------------------------------------------------------------------------

    def accumulate(self, number: int) -> None:
        """Give this replica's sums of gradients, of step ``number``."""
        gradients = {shard.name: _gradient(shard) for shard in self._first}
        self._numbers.pushed(gradients.values())
        self._servers.accumulate(number, gradients)

    def squares(self, number: int) -> list[tuple[nn.Parameter, float]]:
        """Of what this rank pushes, the square of the norm of the sum over all workers: waits for them."""
        if not self._first:
            return []
        began = time.perf_counter()
        squares = self._servers.squares(number).wait().squares
        self._numbers.waited(time.perf_counter() - began)
        return [(shard.param, squares[shard.name]) for shard in self._first]

    def apply(self, number: int, scale: float | None, clip_value: float | None) -> Pull:
        """One update by the sums, times ``scale`` (None: none, they are forgotten), and what it makes of the values."""
        values = [
            shard.local() if shard.local().device.type == "cpu" else torch.empty_like(shard.local(), device="cpu")
            for shard in self.shards
        ]
        into = {shard.name: value for shard, value in zip(self.shards, values, strict=True) if shard.is_first}
        options_of = self._options_of({"scale": 0.0 if scale is None else scale})
        handle = self._servers.apply(number, list(into), options_of=options_of, found_inf=scale is None, into=into)
        return self._coming(handle, values, into)

    def _options_of(self, more: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """For each tensor that this rank pushes the options of its optimizer now."""
        assert self._optimizer is not None
        groups, found, made = self._groups, {}, {}
        for shard in self._first:
            group = groups[id(shard.param)]
            if id(group) not in made:
                rule = row_rule(self._optimizer, group)
                assert rule is not None
                given = {key: group[key] for key in rule.options if key in group}
                made[id(group)] = {key: _plain(value) for key, value in given.items()} | dict(more)
            found[shard.name] = made[id(group)]
        return found

    # -- pushing ----------------------------------------------------------------------------------------------

    def push_gradients(self) -> None:
        """To the optimizer at the servers, divided and clipped as they are."""
        gradients = {shard.name: _gradient(shard) for shard in self._first}
        self._push(gradients, "gradient", self._options_of({}))

    def add(self, values: Sequence[Tensor]) -> None:
        """To the values at the servers, of each parameter."""
        value_of = {id(param): value for param, value in zip(self._params, values, strict=True)}
        self._push({shard.name: shard.local(value_of[id(shard.param)]) for shard in self._first}, "add", {})

    def _push(self, values: Mapping[str, Gradient], rule: str, options_of: Mapping[str, Mapping[str, Any]]) -> None:
        self.wait_for_pushes()
        self._numbers.pushed(values.values())
        self._pushes.append(self._servers.push(values, rule, options_of=options_of))

    def wait_for_pushes(self) -> None:
        """Until all that this rank has pushed was applied."""
        began = time.perf_counter()
        while self._pushes:
            self._numbers.staleness(self._pushes.pop(0).wait().values())
        self._numbers.waited(time.perf_counter() - began)

    # -- clocks -----------------------------------------------------------------------------------------------

    def finish_step(self, step: int) -> None:
        """This rank has pushed what came of step ``step`` (from 0)."""
        if self._options.max_staleness is not None:
            self.wait_for_pushes()
            self._clock = self._servers.clock(step + 1, self._options.max_staleness)

    def wait_for_slowest(self) -> None:
        """Before a step, until the slowest worker is no more than ``max_staleness`` steps behind."""
        if self._clock is not None:
            began = time.perf_counter()
            self._clock.wait()
            self._clock = None
            self._numbers.waited(time.perf_counter() - began)

    # -- state ------------------------------------------------------------------------------------------------

    def _load_optimizer(self, names: set[str]) -> None:
        """Give the servers what the optimizer of this rank keeps of these, and forget it here."""
        if self._optimizer is None:
            return
        states = {}
        for shard in self.shards:
            kept = self._optimizer.state.get(shard.param)
            if kept and shard.name in names:
                states[shard.name] = _tensor_state(shard, kept)
        if states:
            self._servers.load_state(states).wait()
        for shard in self.shards:
            self._optimizer.state.pop(shard.param, None)

    @torch.no_grad()
    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> Mapping[Any, Mapping[str, Any]]:
        """What the servers keep for this rank's parameters, as the optimizer of torch would keep it."""
        if self._optimizer is None or not self.is_placed:
            return optimizer.state
        self.wait_for_pushes()
        found: dict[Any, dict[str, Any]] = {}
        states = self._servers.state([shard.name for shard in self.shards]).wait()
        for shard in self.shards:
            of_param = found.setdefault(shard.param, {})
            for key, rows in states[shard.name].rows.items():
                if key == "value":
                    continue
                param = shard.param
                if key not in of_param:
                    shape = (*param.shape[:1], *rows.shape[1:])
                    of_param[key] = torch.zeros(shape, dtype=rows.dtype, device=param.device)
                shard.local(of_param[key]).copy_(rows.view(shard.local(of_param[key]).shape))
            of_param.update({key: torch.tensor(value) for key, value in states[shard.name].scalars.items()})
        return {param: of_param for param, of_param in found.items() if of_param}

    # -- besides ----------------------------------------------------------------------------------------------

    def report(self) -> dict[str, float]:
        return self._numbers.of_step()

    def close(self) -> None:
        self._numbers.tell()
        self._connection.close()


def _gradient(shard: ServerShard) -> Gradient:
    """Of a shard, on the host."""
    gradient = shard.param.grad
    if gradient is None:
        return None
    if gradient.is_sparse:
        return RowGradient(gradient._indices()[0].cpu(), gradient._values().cpu())
    return shard.local(gradient).cpu()


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
    local = shard.local()
    return TensorState(0, len(local) if local.dim() else 1, rows, scalars)


def _plain(value: Any) -> Any:
    """As JSON has it."""
    if isinstance(value, Tensor):
        return value.item()
    return list(value) if isinstance(value, tuple) else value
