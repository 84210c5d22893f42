"""The options of the strategy whose parameters live in server processes. No torch."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from colossus.config import Config
from colossus.data_parallel.options.strategy_options import Count, CountOrZero, PerReplicaOptions
from colossus.server.process import LEAST_TIMEOUT_SECONDS

#: the optimizers that servers can apply, by the names of torch's classes
SERVER_OPTIMIZERS = ("SGD", "AdamW", "Adam", "Adagrad")
#: algorithms in which a worker has parameters and an optimizer of its own
_OWN = ("downpour", "easgd")

Beta = Annotated[float, Field(gt=0, le=1)]


class ServerOptions(PerReplicaOptions):
    """The options of parameter servers, whose *workers* are the replicas: they pull parameters and push changes."""

    #: "sync": exact, the gradients of all workers make one update; "async": each push is applied at once
    mode: Literal["sync", "async"] = "sync"
    #: the number of server processes, which are spread over the hosts; None: one on each
    servers: Count | None = None
    #: the contents of a push: gradients for the servers' optimizer ("sgd"), updates of the workers' own optimizers
    #: ("downpour"), or the force on an elastic anchor ("easgd")
    algorithm: Literal["sgd", "downpour", "easgd"] = "sgd"
    #: the steps that a worker may be ahead of the slowest one (stale synchronous parallel); None: any number
    max_staleness: CountOrZero | None = None
    #: the steps between two pushes of Downpour, or two elastic exchanges
    push_every: Count = 1
    #: the steps between two pulls of Downpour
    pull_every: Count = 1
    #: beta of the elastic force: alpha = beta / workers
    beta: Beta = 0.9
    #: whether the parameters of the next step are pulled while this one computes, without this one's push
    prefetch: bool = True

    @property
    def has_own_optimizer(self) -> bool:
        """Return whether workers have parameters and optimizers of their own."""
        return self.algorithm in _OWN

    @property
    def is_elastic(self) -> bool:
        return self.algorithm == "easgd"

    def describe(self, data: int) -> str:
        servers = "a server on each host"
        if self.servers is not None:
            servers = f"{self.servers} server{'s' if self.servers > 1 else ''}"
        if self.mode == "sync" and not self.has_own_optimizer:
            return f"exact: parameters at {servers}"
        bound = "" if self.max_staleness is None else f", at most {self.max_staleness} steps apart"
        name = {"sgd": "asynchronous SGD", "downpour": "Downpour", "easgd": "EASGD"}[self.algorithm]
        return f"inexact: {name} with {servers}{bound}"

    def check(self, config: Config) -> list[str]:
        problems = super().check(config)
        problems += self._combination_problems()
        problems += self._staleness_problems()
        problems += self._optimizer_problems(config.optimizer)
        if config.comm.timeout_seconds < LEAST_TIMEOUT_SECONDS:
            problems.append(
                f"comm.timeout_seconds = {config.comm.timeout_seconds:g}: a silent server counts as dead after "
                f"{LEAST_TIMEOUT_SECONDS:g} s at the earliest; use at least that"
            )
        return problems

    def _combination_problems(self) -> list[str]:
        set_fields, problems = self.model_fields_set, []

        def refuse(key: str, why: str) -> None:
            problems.append(f"parallel.strategy.{key} = {getattr(self, key)!r}: {why}")

        if self.mode == "sync" and self.algorithm == "downpour":
            refuse("algorithm", "Downpour's workers do not wait for each other; use mode='async'")
        for key in ("push_every", "pull_every"):
            if key in set_fields and getattr(self, key) != 1 and self.algorithm == "sgd":
                refuse(key, "algorithm 'sgd' pulls and pushes in each step; it is for 'downpour' and the like")
        if "beta" in set_fields and not self.is_elastic:
            refuse("beta", f"has no effect with algorithm = {self.algorithm!r}; it is for 'easgd'")
        return problems

    def _staleness_problems(self) -> list[str]:
        limit, interval = self.max_staleness, max(self.push_every, self.pull_every)
        if limit is None:
            return []
        if self.mode == "sync":
            return [f"parallel.strategy.max_staleness = {limit}: in mode 'sync' nothing is stale; leave it out"]
        if interval > 1 and limit < interval:
            key = "push_every" if self.push_every == interval else "pull_every"
            return [
                f"parallel.strategy.max_staleness = {limit} is below {key} = {interval}: no worker sees the steps that "
                f"another makes in between, so all would wait for each other; use at least {interval}, or {key} <= "
                f"{limit}"
            ]
        return []

    def _optimizer_problems(self, optimizer: Any) -> list[str]:
        name = optimizer_name(optimizer.type)
        options = optimizer.options
        if self.has_own_optimizer or name in SERVER_OPTIMIZERS:
            if not self.has_own_optimizer and options.get("amsgrad"):
                return ["optimizer.amsgrad: the servers' Adam keeps no maxima; leave it out"]
            return []
        return [
            f"optimizer.type = {name!r}: the servers apply {', '.join(SERVER_OPTIMIZERS[:-1])} or "
            f"{SERVER_OPTIMIZERS[-1]} (Adam and Adagrad: type=torch.optim.Adam); any other is a worker's own, with "
            f"algorithm = 'downpour' or 'easgd'"
        ]


def optimizer_name(kind: Any) -> str:
    """Return the name of an optimizer of a config: the string, or the name of its class."""
    return kind if isinstance(kind, str) else getattr(kind, "__qualname__", type(kind).__qualname__)
