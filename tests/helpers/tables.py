"""A model of several tables with sparse gradients, its plain torch twin, and torch's own loop for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import colossus
from colossus import layers
from colossus.layout.parameter import logical_parameters
from colossus.layout.redistribute import gather
from colossus.layout.split_parameter import local_shape
from colossus.state.model_state_dict import full_state_dict

ROWS, SMALL, RARE, DIM, HIDDEN, CLASSES, SAMPLES, LENGTH = 37, 2, 11, 6, 8, 5, 12, 3
STEPS = 4
PADDING = 2


class Stem(nn.Module):
    """Lookups in five tables. Ids from 30 on are also looked up in ``rare``, and none of them may be there; ``fickle``
    is looked up in batches whose first id is even, on all ranks.
    """

    def __init__(self, embedding: Any, plain: Any = nn.Embedding) -> None:
        super().__init__()
        self.words = embedding(ROWS, DIM, padding_idx=PADDING, sparse=True)
        self.plain = plain(ROWS, DIM, padding_idx=PADDING, sparse=True)
        self.small = plain(SMALL, DIM, sparse=True)
        self.rare = embedding(RARE, DIM, sparse=True)
        self.fickle = plain(ROWS, DIM, sparse=True)

    def forward(self, ids: Tensor) -> Tensor:
        """[samples, 1 + LENGTH] -> [samples, DIM]."""
        uses_fickle, ids = bool(ids[0, 0] % 2 == 0), ids[:, 1:]
        x = self.words(ids) * self.words(ids // 3) + self.plain(ids // 2)  # a table of two lookups
        x = x + self.small(ids % 2)
        if uses_fickle:
            x = x + self.fickle(ids)
        x = x.tanh().mean(1)
        samples, _ = (ids >= 30).nonzero(as_tuple=True)
        return x.index_add(0, samples, self.rare(ids[ids >= 30] - 30).to(x.dtype))


class Words(nn.Sequential):
    def __init__(self, kind: Any = layers, plain: Any = nn.Embedding) -> None:
        super().__init__(
            Stem(kind.Embedding, plain),
            kind.Linear(DIM, HIDDEN),
            nn.Tanh(),
            kind.Linear(HIDDEN, HIDDEN),
            nn.Tanh(),
            nn.Linear(HIDDEN, CLASSES),
        )


TABLES = [f"0.{name}.weight" for name in ("words", "plain", "small", "rare", "fickle")]


def twin(start: dict[str, Tensor]) -> Words:
    """In torch alone."""
    model = Words(nn).double()
    model.load_state_dict(start)
    return model


def loss_fn(outputs: Tensor, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
    counted = batch[1] >= 0
    return F.cross_entropy(outputs, batch[1], reduction="sum", ignore_index=-100), int(counted.sum())


def batch_of(step: int) -> tuple[Tensor, Tensor]:
    """With repeated ids and padding; rare ids are on the last samples only, in step 1 nowhere."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(0, 30, (SAMPLES, 1 + LENGTH), generator=generator)
    ids[:, 0] = step % 2
    ids[1, 1:] = ids[0, 1]
    ids[2, 1] = PADDING
    if step != 1:
        ids[-1, 1:] = torch.tensor([36, 31, 36])
    labels = torch.randint(0, CLASSES, (SAMPLES,), generator=generator)
    labels[3] = -100
    return ids, labels


def own_part(batch: tuple[Tensor, Tensor], engine: Any) -> tuple[Tensor, ...]:
    """Of a data rank."""
    index, count = engine.context.index("data"), engine.context.size("data")
    share = SAMPLES // count
    return tuple(tensor[index * share : (index + 1) * share].to(engine.device) for tensor in batch)


class Run:
    """Losses, norms and parameters of each step, state of the optimizer after the last one."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.weights: list[dict[str, Tensor]] = []
        self.state: dict[str, dict[str, Tensor]] = {}
        self.outputs = torch.zeros(0)


def train(
    config: dict[str, Any], model: Any = Words, steps: Sequence[int] = range(STEPS), optimizer: Any = None
) -> Run:
    """On a rank."""
    engine = colossus.initialize(config, model=model, loss_fn=loss_fn, optimizer=optimizer)
    run = Run()
    run.weights.append(full_state_dict(engine.model, engine.context))
    for step in steps:
        result = engine.train_step(own_part(batch_of(step), engine))
        run.losses.append(result.loss)
        run.norms.append(result.grad_norm)
        run.weights.append(full_state_dict(engine.model, engine.context))
    run.state = gathered_state(engine)
    if engine.context.size("pipeline") == 1:
        with torch.no_grad():
            run.outputs = engine.model(own_part(batch_of(0), engine)[0])
    engine.close()
    return run


def gathered_state(engine: Any) -> dict[str, dict[str, Tensor]]:
    """What the optimizer keeps for each parameter of this rank's stage, of full shape."""
    state: dict[str, dict[str, Tensor]] = {}
    for logical in logical_parameters(engine.model):
        of_param = state.setdefault(logical.name, {})
        for key, value in engine.optimizer.state.get(logical.parameter, {}).items():
            if not isinstance(value, Tensor) or value.dim() == 0:
                of_param[key] = torch.as_tensor(float(value))
                continue
            by_row = value.shape != local_shape(logical.parameter)
            layout = replace(logical.layout, dims=(logical.layout.dims[0], ())) if by_row else logical.layout
            shape = (logical.shape[0], 1) if by_row else logical.shape
            of_param[key] = gather(logical.local(value), layout, shape, engine.context, logical.intervals)
    return state


# -- plain torch ----------------------------------------------------------------------------------------------------


class LazyMomentum:
    """A velocity for each row, of the rows that have a gradient."""

    def __init__(self, params: list[nn.Parameter], lr: float, momentum: float) -> None:
        self.params, self.lr, self.momentum = params, lr, momentum
        self.state = {param: {"step": torch.zeros(()), "momentum_buffer": torch.zeros_like(param)} for param in params}

    @torch.no_grad()
    def step(self) -> None:
        for param in self.params:
            if param.grad is None:
                continue
            self.state[param]["step"] += 1
            gradient = param.grad.coalesce()
            for index, row in zip(gradient.indices()[0].tolist(), gradient.values(), strict=True):
                velocity = self.state[param]["momentum_buffer"][index]
                velocity.copy_(self.momentum * velocity + row)
                param[index] -= self.lr * velocity


class RowWiseAdagrad:
    """One sum of mean squares a row."""

    def __init__(self, params: list[nn.Parameter], lr: float, eps: float) -> None:
        self.params, self.lr, self.eps = params, lr, eps
        self.state = {param: {"step": torch.zeros(()), "sum": param.new_zeros((len(param), 1))} for param in params}

    @torch.no_grad()
    def step(self) -> None:
        for param in self.params:
            if param.grad is None:
                continue
            self.state[param]["step"] += 1
            gradient = param.grad.coalesce()
            for index, row in zip(gradient.indices()[0].tolist(), gradient.values(), strict=True):
                total = self.state[param]["sum"][index]
                total += (row * row).sum() / len(row)
                param[index] -= self.lr * row / (total.sqrt() + self.eps)


#: name -> section of a config, and the optimizers of torch of the tables and of the other parameters
RULES: dict[str, tuple[dict[str, Any], Any, Any]] = {
    "sgd": (
        dict(type="SGD", lr=0.5),
        lambda params: torch.optim.SGD(params, lr=0.5),
        lambda params: torch.optim.SGD(params, lr=0.5),
    ),
    "momentum": (
        dict(type="SGD", lr=0.2, momentum=0.7),
        lambda params: LazyMomentum(params, 0.2, 0.7),
        lambda params: torch.optim.SGD(params, lr=0.2, momentum=0.7),
    ),
    "adagrad": (
        dict(type="Adagrad", lr=0.1, lr_decay=0.1, initial_accumulator_value=0.01, weight_decay=0.1),
        lambda params: torch.optim.Adagrad(params, lr=0.1, lr_decay=0.1, initial_accumulator_value=0.01),
        lambda params: torch.optim.Adagrad(
            params, lr=0.1, lr_decay=0.1, initial_accumulator_value=0.01, weight_decay=0.1
        ),
    ),
    "rowwise_adagrad": (
        dict(type="AdamW", lr=0.01, tables=dict(type="RowWiseAdagrad", lr=0.1, eps=1e-3)),
        lambda params: RowWiseAdagrad(params, 0.1, 1e-3),
        lambda params: torch.optim.AdamW(params, lr=0.01),
    ),
    "adam": (
        dict(type="AdamW", lr=0.05, betas=(0.8, 0.9), weight_decay=0.3),
        lambda params: torch.optim.SparseAdam(params, lr=0.05, betas=(0.8, 0.9)),
        lambda params: torch.optim.AdamW(params, lr=0.05, betas=(0.8, 0.9), weight_decay=0.3),
    ),
}


def in_torch(rule: str, start: dict[str, Tensor], clip: float | None, steps: Sequence[int] = range(STEPS)) -> Run:
    """The same training in one process of plain torch."""
    _, of_tables, of_others = RULES[rule]
    model = twin(start)
    named = dict(model.named_parameters())
    optimizers = [
        of_tables([param for name, param in named.items() if name in TABLES]),
        of_others([param for name, param in named.items() if name not in TABLES]),
    ]
    run = Run()
    run.weights.append({name: value.clone() for name, value in model.state_dict().items()})
    for step in steps:
        batch = batch_of(step)
        for param in named.values():
            param.grad = None
        total, count = loss_fn(model(batch[0]), batch)
        (total / count).backward()
        grads = [param.grad for param in named.values() if param.grad is not None]
        norm = torch.stack([(grad.to_dense() if grad.is_sparse else grad).norm() for grad in grads]).norm()
        if clip is not None:
            scale = (clip / (norm + 1e-6)).clamp(max=1.0).item()
            for param in named.values():
                if param.grad is not None:
                    param.grad = param.grad * scale
        for optimizer in optimizers:
            optimizer.step()
        run.losses.append((total / count).item())
        run.norms.append(norm.item())
        run.weights.append({name: value.clone() for name, value in model.state_dict().items()})
    for name, param in named.items():
        values = next((candidate.state[param] for candidate in optimizers if param in candidate.state), {})
        run.state[name] = {key: torch.as_tensor(value) for key, value in values.items() if value is not None}
    with torch.no_grad():
        run.outputs = model(batch_of(0)[0])
    return run


def assert_same(run: Run, expected: Run, case: str, outputs: Tensor | None = None) -> None:
    """To 1e-10, in every step."""

    def close(one: Tensor, other: Tensor, what: str) -> None:
        torch.testing.assert_close(
            one.double(), other.double(), rtol=1e-10, atol=1e-10, msg=lambda text: f"{case}: {what}: {text}"
        )

    for step in range(len(expected.losses)):
        close(torch.tensor(run.losses[step]), torch.tensor(expected.losses[step]), f"loss of step {step}")
        close(torch.tensor(run.norms[step]), torch.tensor(expected.norms[step]), f"norm of step {step}")
        assert run.weights[step + 1].keys() == expected.weights[step + 1].keys()
        for name, value in expected.weights[step + 1].items():
            close(run.weights[step + 1][name], value, f"{name} after step {step}")
    for name, entries in run.state.items():
        if name in expected.state:
            wanted = expected.state[name]
            assert entries.keys() == wanted.keys(), (case, name, entries.keys(), wanted.keys())
            for key, value in wanted.items():
                close(entries[key], value, f"{key} of {name}")
    if outputs is not None:
        close(run.outputs, outputs, "outputs")
