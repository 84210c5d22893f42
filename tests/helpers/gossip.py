"""Gossip by itself: a dense simulation in numpy, with plain torch's gradients and optimizers, and runs to compare."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from helpers.covered import note_plans_in
from helpers.ranks import run_ranks
from torch import Tensor, nn

import colossus
from colossus.comm.objects import all_gather_object
from colossus.graphs.graph_family import GraphFamily, Sends

WIDTH, CLASSES, SAMPLES = 5, 3, 4
SGD: dict[str, Any] = dict(type="SGD", lr=0.3, momentum=0.9, weight_decay=0.03)
ADAMW: dict[str, Any] = dict(type="AdamW", lr=0.05, weight_decay=0.1)


class Net(nn.Module):
    """Odd sizes, a scalar, a frozen and an unused parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 7), nn.Linear(7, CLASSES, bias=False)
        self.gain = nn.Parameter(torch.tensor(0.7))
        self.fixed = nn.Parameter(torch.linspace(-1, 1, 7), requires_grad=False)
        self.unused = nn.Linear(2, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.gain * torch.tanh(self.up(x)) + self.fixed)


def classify(outputs: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    labels = batch["labels"]
    return F.cross_entropy(outputs, labels, ignore_index=-100, reduction="sum"), (labels != -100).sum()


def part_of(step: int, replica: int) -> dict[str, Tensor]:
    """A replica's samples of a step; of each another number counts."""
    generator = torch.Generator().manual_seed(100 * step + replica)
    inputs = torch.randn(SAMPLES, WIDTH, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, CLASSES, (SAMPLES,), generator=generator)
    labels[: (replica + step) % SAMPLES] = -100
    return {"inputs": inputs, "labels": labels}


class Matrices(GraphFamily):
    """A list of matrices, cycled; column j is what j gives."""

    def __init__(self, matrices: Sequence[Any]) -> None:
        self.matrices = [np.asarray(matrix) for matrix in matrices]

    def period(self, replicas: int, peers: int) -> int:
        return len(self.matrices)

    def sends(self, replicas: int, step: int, peers: int) -> Sends:
        matrix = self.matrices[step % len(self.matrices)]
        return [(source, to, matrix[to, source]) for to, source in zip(*np.nonzero(matrix), strict=True)]


def irregular(replicas: int, period: int = 3, seed: int = 5) -> list[np.ndarray]:
    """Column-stochastic, with holes, a ring in each; whoever mixes by them has other weights in every step."""
    generator, matrices = np.random.default_rng(seed), []
    for _ in range(period):
        matrix = generator.uniform(0.1, 1.0, (replicas, replicas)) * (generator.random((replicas, replicas)) < 0.4)
        for index in range(replicas):
            matrix[index, index] += 0.5
            matrix[(index + 1) % replicas, index] += 0.3
        matrices.append(matrix / matrix.sum(0))
    return matrices


# -- the simulation -------------------------------------------------------------------------------------------


@dataclass
class Simulated:
    """By step: the replicas' z ([replicas, numbers]), push-sum weights, losses and gradient norms."""

    z: list[np.ndarray] = field(default_factory=list)
    weights: list[np.ndarray] = field(default_factory=list)
    losses: list[list[float]] = field(default_factory=list)
    norms: list[list[float]] = field(default_factory=list)
    #: what all replicas began with, and all updates since, summed
    totals: list[np.ndarray] = field(default_factory=list)
    optimizers: list[torch.optim.Optimizer] = field(default_factory=list)
    models: list[nn.Module] = field(default_factory=list)


def simulate(
    model: nn.Module,
    matrix_of: Callable[[int], np.ndarray],
    replicas: int,
    steps: int,
    optimizer: dict[str, Any],
    loss_of: Callable[[nn.Module, int, int], tuple[Tensor, Tensor]],
    *,
    overlap: int = 0,
    clip: float | None = None,
    combines_first: bool = False,
    skips: tuple[int, int] | None = None,
) -> Simulated:
    """Dense matrices over the replicas' vectors; gradients and updates of each by plain torch.

    Args:
        loss_of: (model, step, replica) -> (sum, count).
        skips: a step and a replica whose update is left out.
    """
    made = Simulated()
    options = {name: value for name, value in optimizer.items() if name != "type"}
    made.models = [copy.deepcopy(model) for _ in range(replicas)]
    params = [[param for param in each.parameters() if param.requires_grad] for each in made.models]
    made.optimizers = [getattr(torch.optim, optimizer["type"])(of, **options) for of in params]
    x, w = np.stack([_flat(of) for of in params]), np.ones(replicas)
    z, all_x = x.copy(), x.sum(0)
    sent: list[tuple[np.ndarray, np.ndarray]] = []
    for step in range(steps):
        update, losses, norms = [], [], []
        if combines_first:
            sent.append((x.copy(), w.copy()))
            x, w = _mixed(matrix_of, step, overlap, sent, x, w)
        for index, of in enumerate(params):
            total, count = loss_of(made.models[index], step, index)
            made.optimizers[index].zero_grad()
            (total / count).backward()
            norm = torch.nn.utils.clip_grad_norm_(of, clip or float("inf"))
            before = x[index] / w[index]
            _unflat(before, of)
            if (step, index) != skips:
                made.optimizers[index].step()
            update.append(_flat(of) - before)
            losses.append((total / count).item())
            norms.append(norm.item())
        x = x + np.stack(update)
        if not combines_first:
            sent.append((x.copy(), w.copy()))
            x, w = _mixed(matrix_of, step, overlap, sent, x, w)
        z = x / w[:, None]
        for index, of in enumerate(params):
            _unflat(z[index], of)
        all_x = all_x + np.sum(update, axis=0)
        made.totals.append(all_x)
        made.z.append(z.copy())
        made.weights.append(w.copy())
        made.losses.append(losses)
        made.norms.append(norms)
    return made


def _mixed(matrix_of: Any, step: int, overlap: int, sent: Any, x: Any, w: Any) -> tuple[np.ndarray, np.ndarray]:
    kept = np.diag(matrix_of(step))
    x, w = kept[:, None] * x, kept * w
    if step >= overlap:
        matrix = matrix_of(step - overlap)
        others = matrix - np.diag(np.diag(matrix))
        x, w = x + others @ sent[step - overlap][0], w + others @ sent[step - overlap][1]
    return x, w


def _state(optimizer: torch.optim.Optimizer, params: list[nn.Parameter]) -> dict[tuple[int, str], np.ndarray]:
    return {
        (number, name): value.detach().numpy().copy()
        for number, param in enumerate(params)
        for name, value in optimizer.state.get(param, {}).items()
        if isinstance(value, Tensor) and name != "step"
    }


def optimizer_state(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[tuple[int, str], np.ndarray]:
    """(number of the trainable parameter, entry) -> what the optimizer keeps, without counts of steps."""
    return _state(optimizer, [param for param in model.parameters() if param.requires_grad])


def _flat(params: Sequence[Tensor]) -> np.ndarray:
    return np.concatenate([param.detach().reshape(-1).numpy() for param in params])


def _unflat(numbers: np.ndarray, params: Sequence[Tensor]) -> None:
    with torch.no_grad():
        start = 0
        for param in params:
            param.copy_(torch.from_numpy(numbers[start : start + param.numel()]).view_as(param))
            start += param.numel()


# -- runs -----------------------------------------------------------------------------------------------------


@dataclass
class Run:
    """Of a replica, by step: z, push-sum weight, loss, norm, what the strategy reports; x and w of all replicas with
    what is in flight; the state after the last step."""

    z: list[np.ndarray] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    reports: list[dict[str, float]] = field(default_factory=list)
    total_x: list[np.ndarray] = field(default_factory=list)
    total_w: list[float] = field(default_factory=list)
    optimizer: dict[tuple[int, str], np.ndarray] = field(default_factory=dict)


def settings_of(strategy: dict[str, Any], replicas: int, optimizer: dict[str, Any], **train: Any) -> dict[str, Any]:
    return dict(
        parallel=dict(data=replicas, strategy=strategy),
        optimizer=optimizer,
        lr_schedule=dict(type="constant", warmup_steps=0),
        train={
            **dict(steps=1000, global_batch_size=SAMPLES * replicas, precision="fp64", seed=5, clip_grad_norm=None),
            **train,
        },
        device="cpu",
    )


class Flat(nn.Module):
    """No gradient at all: mixing alone."""

    def __init__(self) -> None:
        super().__init__()
        self.center, self.other = nn.Parameter(torch.linspace(-1, 1, WIDTH)), nn.Parameter(torch.tensor(0.25))

    def forward(self, x: Tensor) -> Tensor:
        return (self.center + self.other - x) * 0.0


def squares(outputs: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    return 0.5 * outputs.square().sum(), torch.tensor(float(len(outputs)))


#: how losses are made of what the models give
LOSSES: dict[type[nn.Module], Any] = {Net: classify, Flat: squares}


def train(
    settings: dict[str, Any],
    steps: int,
    *,
    model: type[nn.Module] = Net,
    is_apart: bool = False,
    totals: bool = False,
    fails: tuple[int, int] | None = None,
) -> Run:
    """Body of a rank.

    Args:
        is_apart: replica i begins with i added to all numbers.
        fails: a step and a replica whose loss is not finite.
    """
    engine = colossus.initialize(settings, model=model, loss_fn=LOSSES[model])
    run, strategy, group = Run(), engine.strategy, engine.context.group("data")
    params = [param for param in engine.model.parameters() if param.requires_grad]
    if is_apart:
        with torch.no_grad():
            torch._foreach_add_(params, float(group.index))
    for step in range(steps):
        batch = part_of(step, group.index)
        if (step, group.index) == fails:
            batch["inputs"] *= torch.inf
        result = engine.train_step(batch)
        run.losses.append(result.loss)
        run.norms.append(result.grad_norm)
        run.z.append(_flat(params))
        run.weights.append(getattr(strategy, "weight", 1.0))
        run.reports.append(strategy.report())
        if totals:
            views, weight = strategy.average_addend()
            shares = all_gather_object((_flat(views), weight), group)
            run.total_x.append(np.sum([x for x, _ in shares], axis=0))
            run.total_w.append(sum(w for _, w in shares))
    run.optimizer = _state(engine.optimizer, params)
    engine.close()
    return run


def run_cases(replicas: int, cases: dict[str, tuple[dict[str, Any], int, dict[str, Any]]]) -> dict[str, list[Run]]:
    """name -> (settings, steps, options of `train`), one after the other in one group of ranks."""

    def body(rank: int) -> list[Run]:
        return [train(settings, steps, **options) for settings, steps, options in cases.values()]

    note_plans_in([settings for settings, *_ in cases.values()])
    by_rank = run_ranks(replicas, body, with_context=False)
    return {name: [runs[number] for runs in by_rank] for number, name in enumerate(cases)}


def _start(rank: int) -> nn.Module:
    engine = colossus.initialize(settings_of(dict(type="all_reduce"), 1, SGD), model=Net, loss_fn=classify)
    engine.close()
    return engine.model


@cache
def start() -> nn.Module:
    """The model that every replica begins with; not to be changed."""
    model: nn.Module = run_ranks(1, _start, with_context=False)[0]
    return model


def loss_of(model: nn.Module, step: int, replica: int) -> tuple[Tensor, Tensor]:
    batch = part_of(step, replica)
    return classify(model(batch["inputs"]), batch)
