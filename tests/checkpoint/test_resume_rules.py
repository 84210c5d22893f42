"""What happens where a run that goes on is not the run that was saved: rules, warnings that one rank tells, errors."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.checkpoints import bits, contents
from helpers.ranks import run_ranks
from helpers.strategies import LocalSteps
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import colossus
from colossus import layers
from colossus.checkpoint.errors import CheckpointError
from colossus.checkpoint.folder import name_of
from colossus.checkpoint.manifest import read_manifest
from colossus.engine.fit import fit
from colossus.engine.hooks import Hook

WIDTH, CLASSES = 6, 5


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = layers.Linear(WIDTH, 8, split="column"), layers.Linear(8, CLASSES, split="row")
        self.norm = nn.LayerNorm(CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.down(self.up(x).tanh()))


def classify(outputs: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    return nn.functional.cross_entropy(outputs, batch["labels"], reduction="sum"), len(outputs)


class Vectors(Dataset[Any]):
    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index)
        return {"inputs": torch.randn(WIDTH, generator=generator), "labels": torch.tensor(index % CLASSES)}


class OwnBatches:
    """A loader of one's own that gives each data rank its own batches, and knows its place."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size, self.next = rank, size, 0

    def __iter__(self) -> Iterator[Any]:
        part = 8 // self.size
        while True:
            first = (8 * self.next + part * self.rank) % 32
            self.next += 1
            samples = [Vectors()[index] for index in range(first, first + part)]
            yield {key: torch.stack([each[key] for each in samples]) for key in samples[0]}

    def state_dict(self) -> dict[str, Any]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.next = state["next"]


def own_batches(data_rank: int, data_size: int) -> OwnBatches:
    return OwnBatches(data_rank, data_size)


class Listener(logging.Handler):
    """What this rank logs."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.told: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.told.append(record.getMessage())


def settings(folder: Path, parallel: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    config: dict[str, Any] = dict(
        parallel=parallel or {},
        train=dict(steps=2, global_batch_size=8, precision="fp64", seed=3),
        optimizer=dict(type="AdamW", lr=1e-2),
        checkpoint=dict(dir=str(folder)),
        device="cpu",
    )
    for key, value in more.items():
        config[key] = {**config.get(key, {}), **value} if isinstance(value, dict) else value
    return config


def engine_of(config: dict[str, Any], data: Any = None, optimizer: Any = None) -> Any:
    if optimizer is not None:
        del config["optimizer"]
    given = dict(data=Vectors() if data is None else data) | ({} if optimizer is None else dict(optimizer=optimizer))
    return colossus.initialize(config, model=Net, loss_fn=classify, **given)


def save_after(rank: int, steps: int, config: dict[str, Any], hooks: Sequence[Hook] = (), **given: Any) -> list[float]:
    """Body of a rank: train and save."""
    engine = engine_of(config, **given)
    losses = [engine.train_step(next(engine.loader)).loss for _ in range(steps)]
    engine.checkpoints.save().wait()
    engine.close()
    return losses


def saved(folder: Path, steps: int = 2, world: int = 1, parallel: Any = None, given: Any = None, **more: Any) -> Path:
    body = partial(save_after, **(given or {}))
    run_ranks(world, body, steps, settings(folder, parallel, **more), with_context=False)
    return folder / name_of(steps)


def loaded(
    rank: int, path: Path, config: dict[str, Any], look: Callable[[Any], Any], given: dict[str, Any]
) -> tuple[Any, list[str], str]:
    """Body of a rank: what ``look`` sees after a load, what was logged, and what was refused."""
    listener = Listener()
    logging.getLogger("colossus").addHandler(listener)
    engine = engine_of(config, **given)
    before = {name: param.detach().clone() for name, param in engine.model.named_parameters()}
    refused = ""
    try:
        engine.checkpoints.load(path)
    except CheckpointError as error:
        refused = str(error)
        assert all(torch.equal(param, before[name]) for name, param in engine.model.named_parameters())
        assert engine.completed_steps == 0
        assert not engine.optimizer.state
    seen = look(engine)
    engine.close()
    return seen, listener.told, refused


def load(
    path: Path,
    config: dict[str, Any],
    look: Callable[[Any], Any] = lambda engine: None,
    world: int = 1,
    **given: Any,
) -> list[tuple[Any, list[str], str]]:
    return run_ranks(world, loaded, path, config, look, given, with_context=False)


# -- the optimizer --------------------------------------------------------------------------------------------


def test_another_optimizer_is_refused_on_all_ranks(tmp_path: Path) -> None:
    path = saved(tmp_path, world=2, parallel=dict(data=2))
    ranks = load(path, settings(tmp_path / "other", dict(tensor=2), optimizer=dict(type="SGD", momentum=0.9)), world=2)
    for _, told, refused in ranks:
        assert "was saved with the optimizer AdamW, this run has SGD" in refused
        assert "checkpoint.weights" in refused
        assert not told


def test_an_optimizer_that_kept_nothing_may_become_another(tmp_path: Path) -> None:
    path = saved(tmp_path, optimizer=dict(type="SGD"))
    ((step, _, refused),) = load(
        path, settings(tmp_path / "other"), lambda engine: engine.train_step(next(engine.loader)).step
    )
    assert not refused
    assert step == 3


def groups(engine: Any) -> list[dict[str, Any]]:
    return [{key: value for key, value in group.items() if key != "params"} for group in engine.optimizer.param_groups]


def after_a_step(engine: Any) -> tuple[float, list[dict[str, Any]]]:
    return engine.train_step(next(engine.loader)).lr, groups(engine)


def test_options_that_the_config_changes_are_the_configs(tmp_path: Path) -> None:
    """Another lr, another weight decay: those of now, told once by one rank. All else is as it was."""
    path = saved(tmp_path, world=2, parallel=dict(data=2), optimizer=dict(betas=(0.8, 0.95)))
    config = settings(
        tmp_path / "other", dict(data=2), optimizer=dict(lr=5e-3, weight_decay=0.3, betas=(0.8, 0.95)),
        train=dict(steps=9),
    )  # fmt: skip
    ranks = load(path, config, after_a_step, world=2)
    for (lr, (group,)), _, refused in ranks:
        assert not refused
        assert lr == 5e-3
        assert (group["weight_decay"], tuple(group["betas"])) == (0.3, (0.8, 0.95))
    (first,) = ranks[0][1]
    assert "lr was 0.01 and is 0.005" in first
    assert "weight_decay was 0.01 and is 0.3" in first
    assert not ranks[1][1]


def changes_options(rank: int, config: dict[str, Any]) -> None:
    engine = engine_of(config)
    engine.train_step(next(engine.loader))
    engine.optimizer.param_groups[0].update(weight_decay=0.7, lr_scale=0.5)
    engine.checkpoints.save().wait()
    engine.close()


def test_options_that_were_changed_on_the_way_stay_changed(tmp_path: Path) -> None:
    run_ranks(1, changes_options, settings(tmp_path), with_context=False)
    (((lr, (group,)), told, _),) = load(tmp_path / name_of(1), settings(tmp_path / "other"), after_a_step)
    assert (lr, group["weight_decay"], group["lr"]) == (1e-2, 0.7, 5e-3)
    assert not told


def in_two_groups(named: Any) -> torch.optim.Optimizer:
    params = [param for _, param in named]
    return torch.optim.AdamW([dict(params=params[:2]), dict(params=params[2:], weight_decay=0.5)], lr=1e-2)


def test_other_groups_keep_the_state_of_each_parameter(tmp_path: Path) -> None:
    path = saved(tmp_path)

    def look(engine: Any) -> list[float]:
        assert groups(engine)[1]["weight_decay"] == 0.5
        return [engine.optimizer.state[param]["step"].item() for param in engine.model.parameters()]

    ((steps, told, refused),) = load(path, settings(tmp_path / "other"), look, optimizer=in_two_groups)
    assert not refused
    assert steps == [2.0] * 6
    assert told == ["the optimizer has 2 parameter groups, the checkpoint's had 1: their options are those of this run"]


class Factors(torch.optim.SGD):
    """Keeps the norm of each row of a matrix: no shape of a part can be known from that of the whole."""

    def step(self, closure: Any = None) -> None:
        super().step()
        for group in self.param_groups:
            for param in group["params"]:
                if param.dim() == 2:
                    self.state[param]["rows"] = param.detach().norm(dim=1)


def factors(named: Any) -> torch.optim.Optimizer:
    return Factors([param for _, param in named], lr=0.1)


def fails_to_save(rank: int, config: dict[str, Any], optimizer: Any = factors) -> str:
    engine = engine_of(config, optimizer=optimizer)
    engine.train_step(next(engine.loader))
    with pytest.raises(CheckpointError) as caught:
        engine.checkpoints.save().wait()
    engine.close()
    return str(caught.value)


def test_state_of_another_shape_needs_whole_parameters(tmp_path: Path) -> None:
    """It is saved and loaded under plans that keep the parameter whole, and refused in words by others: either way."""
    path = saved(tmp_path, world=2, parallel=dict(data=2), given=dict(optimizer=factors))
    assert contents(path).tensors["optimizer/up.weight/rows"].shape == (8,)
    ((seen, _, refused),) = load(
        path, settings(tmp_path / "one"), lambda engine: engine.optimizer.state[engine.model.up.weight]["rows"],
        optimizer=factors,
    )  # fmt: skip
    assert not refused
    assert torch.equal(seen, contents(path).tensors["optimizer/up.weight/rows"])
    for _, _, refused in load(path, settings(tmp_path / "two", dict(tensor=2)), world=2, optimizer=factors):
        assert "optimizer/up.weight/rows has shape (8,)" in refused
        assert "of which a rank holds a part here" in refused
    for message in run_ranks(2, fails_to_save, settings(tmp_path / "split", dict(tensor=2)), with_context=False):
        assert "optimizer/up.weight/rows has shape (4,)" in message


def test_amsgrad_cannot_be_turned_on_on_the_way(tmp_path: Path) -> None:
    path = saved(tmp_path)
    config = settings(tmp_path / "other", dict(data=2), optimizer=dict(amsgrad=True))
    for _, _, refused in load(path, config, world=2):
        assert "without amsgrad, this run has amsgrad=True" in refused


class Keeps(torch.optim.SGD):
    """Keeps something beside what SGD keeps."""

    def __init__(self, params: Any, keep: Callable[[Tensor], dict[Any, Any]]) -> None:
        super().__init__(params, lr=0.1)
        self.keep = keep

    def step(self, closure: Any = None) -> None:
        super().step()
        for param in self.param_groups[0]["params"]:
            self.state[param].update(self.keep(param))


def keeps(keep: Callable[[Tensor], dict[Any, Any]]) -> Callable[[Any], torch.optim.Optimizer]:
    return lambda named: Keeps([param for _, param in named], keep)


UNSAVED: list[tuple[Callable[[Tensor], dict[Any, Any]], str]] = [
    (lambda param: {0: 1.0}, "state is kept under 0; a checkpoint needs names"),
    (lambda param: {"a/b": 1.0}, "state is kept under 'a/b'"),
    (lambda param: {"history": [torch.zeros_like(param)]}, "in a nest, kept for a parameter of which this rank holds"),
    (lambda param: {"made by": object()}, "a builtins.object cannot be saved"),
]


def fail_to_save(rank: int, config: dict[str, Any]) -> list[str]:
    return [fails_to_save(rank, dict(config), keeps(keep)) for keep, _ in UNSAVED]


def test_state_that_cannot_be_saved_is_refused_on_all_ranks(tmp_path: Path) -> None:
    for messages in run_ranks(2, fail_to_save, settings(tmp_path, dict(tensor=2)), with_context=False):
        for message, (_, said) in zip(messages, UNSAVED, strict=True):
            assert said in message


def test_nests_of_tensors_are_saved_for_whole_parameters(tmp_path: Path) -> None:
    optimizer = keeps(lambda param: {"history": [param.detach().clone(), {"at": (1, None)}]})
    path = saved(tmp_path, given=dict(optimizer=optimizer))

    def look(engine: Any) -> Any:
        return engine.optimizer.state[engine.model.up.weight]["history"], engine.model.up.weight.detach()

    (((history, weight), _, _),) = load(path, settings(tmp_path / "other"), look, optimizer=optimizer)
    assert torch.equal(history[0], weight)
    assert history[1] == {"at": (1, None)}


# -- dtypes ---------------------------------------------------------------------------------------------------


def dtypes(engine: Any) -> tuple[set[torch.dtype], set[torch.dtype], float]:
    state = [
        value.dtype
        for of_param in engine.optimizer.state.values()
        for name, value in of_param.items()
        if name != "step"
    ]
    loss = engine.train_step(next(engine.loader)).loss
    return {param.dtype for param in engine.model.parameters()}, set(state), loss


@pytest.mark.parametrize(
    ("then", "now", "params", "state", "tolerance"),
    [
        ("fp32", "fp64", torch.float64, torch.float64, 1e-5),
        (dict(params="bf16", optimizer="bf16"), "fp32", torch.float32, torch.float32, 0.1),
        pytest.param("fp64", "fp32", torch.float32, torch.float32, 1e-5, marks=pytest.mark.long),
        pytest.param("bf16", "fp32", torch.float32, torch.float32, 0.1, marks=pytest.mark.long),
    ],
)
def test_state_has_the_dtype_of_its_parameter_again(
    tmp_path: Path, then: Any, now: str, params: torch.dtype, state: torch.dtype, tolerance: float
) -> None:
    """Precision may change on the way: the numbers are those that were saved, cast."""
    path = saved(tmp_path, train=dict(precision=then))
    (reference,) = run_ranks(1, save_after, 3, settings(tmp_path / "whole", train=dict(precision=then)),
                             with_context=False)  # fmt: skip
    for world, parallel in ((1, {}), (2, dict(data=2, zero=3))):
        config = settings(tmp_path / "other", parallel, train=dict(precision=now))
        for (of_params, of_state, loss), _, refused in load(path, config, dtypes, world=world):
            assert not refused
            assert of_params == {params}
            assert of_state == {state}
            assert abs(loss - reference[2]) <= tolerance * reference[2]


class Wide(torch.optim.Optimizer):
    """Keeps its momentum wider than the parameters are."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, dict(lr=0.1))

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for param in self.param_groups[0]["params"]:
            momentum = self.state[param].setdefault("momentum", torch.zeros_like(param, dtype=torch.float64))
            momentum.mul_(0.9).add_(param.grad)
            param.sub_(0.1 * momentum)


def wide(named: Any) -> torch.optim.Optimizer:
    return Wide([param for _, param in named])


def test_state_wider_than_its_parameter_keeps_its_dtype_and_bits(tmp_path: Path) -> None:
    narrow = dict(precision=dict(params="bf16", optimizer="bf16"))
    path = saved(tmp_path, given=dict(optimizer=wide), train=narrow)

    def look(engine: Any) -> Tensor:
        return engine.optimizer.state[engine.model.down.weight]["momentum"]

    ((momentum, _, _),) = load(path, settings(tmp_path / "other", train=narrow), look, optimizer=wide)
    wanted = contents(path).tensors["optimizer/down.weight/momentum"]
    assert momentum.dtype == torch.float64
    assert torch.equal(bits(momentum), bits(wanted))


# -- the data and random generators ---------------------------------------------------------------------------


def test_another_seed_or_batch_size_is_told_once(tmp_path: Path) -> None:
    path = saved(tmp_path, world=2, parallel=dict(data=2))
    config = settings(tmp_path / "other", dict(tensor=2), train=dict(seed=4, global_batch_size=4))
    ranks = load(path, config, lambda engine: engine.loader.step, world=2)
    assert [seen for seen, _, _ in ranks] == [2, 2]
    assert [len(told) for _, told, _ in ranks] == [2, 0]
    assert "seed was 3 when the checkpoint was written and is 4 now" in ranks[0][1][0]
    assert "global_batch_size was 8 when the checkpoint was written and is 4 now" in ranks[0][1][1]


def next_samples(engine: Any) -> Tensor:
    return next(engine.loader)["inputs"]


def test_a_loaders_own_place_with_other_data_ranks(tmp_path: Path) -> None:
    """Each data rank goes on from its own place where there are as many; else from that of the first, which is told."""
    path = saved(tmp_path, world=2, parallel=dict(data=2), given=dict(data=own_batches))
    wanted = torch.stack([Vectors()[index]["inputs"] for index in range(16, 24)]).double()
    same = load(path, settings(tmp_path / "same", dict(data=2)), next_samples, world=2, data=own_batches)
    assert torch.equal(torch.cat([seen for seen, _, _ in same]), wanted)
    assert not any(told for _, told, _ in same)
    more = load(path, settings(tmp_path / "more", dict(data=4)), next_samples, world=4, data=own_batches)
    assert torch.equal(torch.cat([seen for seen, _, _ in more]), wanted)
    ((message,), *others) = [told for _, told, _ in more]
    assert (
        "the checkpoint is of 2 data ranks, each with batches of its own from your loader; now there are 4" in message
    )
    assert others == [[], [], []]


def shuffled() -> Any:
    return DataLoader(Vectors(), batch_size=8, shuffle=True)


def test_a_global_order_is_the_same_for_any_number_of_data_ranks(tmp_path: Path) -> None:
    """Of a loader that is shuffled by the global generator; it is read up to its place, which one rank tells."""
    path = saved(tmp_path, world=2, parallel=dict(data=2), given=dict(data=shuffled))
    seen = {}
    for world, parallel in ((1, {}), (2, dict(tensor=2)), (4, dict(data=4))):
        ranks = load(path, settings(tmp_path / "other", parallel), next_samples, world=world, data=shuffled)
        assert [len(told) for _, told, _ in ranks] == [1] + [0] * (world - 1)
        assert "has no state_dict: reading 2 items of pass 0 again to resume" in ranks[0][1][0]
        whole = [each for each, _, _ in ranks] if "tensor" not in parallel else [ranks[0][0]]
        seen[str(parallel)] = torch.cat(whole)
    first, *others = seen.values()
    assert first.shape == (8, WIDTH)
    assert all(torch.equal(first, other) for other in others)


def draws_and_saves(rank: int, config: dict[str, Any]) -> float:
    engine = engine_of(config)
    torch.rand(5)
    engine.context.rng.named("mine").seed()
    engine.checkpoints.save(background=False).wait()
    number = torch.rand(()).item()
    engine.close()
    return number


def test_generators_under_another_plan(tmp_path: Path) -> None:
    """As many data ranks: they go on; another number: seeded anew, not from the beginning of the run."""
    numbers = run_ranks(2, draws_and_saves, settings(tmp_path, dict(data=2)), with_context=False)
    assert numbers[0] != numbers[1]

    def look(engine: Any) -> float:
        return torch.rand(()).item()

    path = tmp_path / name_of(0)
    same = load(path, settings(tmp_path / "same", dict(data=2, tensor=2)), look, world=4)
    assert [seen for seen, _, _ in same] == [numbers[0], numbers[0], numbers[1], numbers[1]]
    order = ("tensor", "pipeline", "sequence", "data")
    turned = load(path, settings(tmp_path / "turned", dict(data=2, tensor=2, rank_order=order)), look, world=4)
    assert [seen for seen, _, _ in turned] == [numbers[0], numbers[1], numbers[0], numbers[1]]
    ((seen, _, _),) = load(path, settings(tmp_path / "fewer"), look)
    ((begun, _),) = run_ranks(1, first_draw, settings(tmp_path / "begun"), with_context=False)
    assert seen not in (*numbers, begun)


def first_draw(rank: int, config: dict[str, Any]) -> tuple[float, None]:
    engine = engine_of(config)
    number = torch.rand(()).item()
    engine.close()
    return number, None


class OwnOfEachRank(Hook):
    """Keeps what belongs to its rank alone, of its shards, say."""

    def __init__(self, own: int = -1) -> None:
        self.own = own

    def state_dict(self) -> dict[str, Any]:
        return {"own": self.own, "shards": torch.full((2,), self.own)}

    def load_state_dict(self, state: Any) -> None:
        self.own = state["own"]
        assert state["shards"].tolist() == [self.own] * 2


def saves_hook(rank: int, config: dict[str, Any]) -> None:
    engine = engine_of(config)
    engine.checkpoints.hooks = [OwnOfEachRank(), OwnOfEachRank(7 + rank)]
    engine.checkpoints.save().wait()
    engine.close()


def loads_hook(rank: int, path: Path, config: dict[str, Any]) -> tuple[int, list[str]]:
    listener = Listener()
    logging.getLogger("colossus").addHandler(listener)
    engine = engine_of(config)
    hooks = [OwnOfEachRank(99), OwnOfEachRank()]
    engine.checkpoints.hooks = hooks
    engine.checkpoints.load(path)
    engine.close()
    assert hooks[0].own == -1
    return hooks[1].own, listener.told


def test_what_hooks_keep_on_each_rank(tmp_path: Path) -> None:
    run_ranks(2, saves_hook, settings(tmp_path, dict(tensor=2)), with_context=False)
    path = tmp_path / name_of(0)
    assert "ranks/1/hooks/OwnOfEachRank" not in read_manifest(path).values, "those that are the same are there once"
    config = settings(tmp_path / "same", dict(tensor=2))
    assert run_ranks(2, loads_hook, path, config, with_context=False) == [(7, []), (8, [])]
    ranks = run_ranks(2, loads_hook, path, settings(tmp_path / "other", dict(data=2)), with_context=False)
    assert [own for own, _ in ranks] == [7, 7]
    assert [len(told) for _, told in ranks] == [1, 0]
    assert "what the hook OwnOfEachRank~2 kept differed between ranks" in ranks[0][1][0]


# -- the rest -------------------------------------------------------------------------------------------------


def test_replicas_with_parameters_of_their_own(tmp_path: Path) -> None:
    """No mixture of two replicas is ever saved; where there are others than then, all are the first."""
    parallel = dict(data=2, strategy=dict(type=LocalSteps, every=10))
    path = saved(tmp_path, world=2, parallel=parallel)

    def weights(engine: Any) -> Tensor:
        return torch.cat([param.detach().reshape(-1) for param in engine.model.parameters()])

    same = load(path, settings(tmp_path / "same", parallel), weights, world=2)
    assert not torch.equal(same[0][0], same[1][0])
    assert not any(told for _, told, _ in same)
    ((one, told, _),) = load(path, settings(tmp_path / "one"), weights)
    assert torch.equal(one, same[0][0])
    assert told == ["the checkpoint has 2 replicas, now there are 1: all go on from the first"]


def stops_later(rank: int, folder: Path, steps: int, resume: bool) -> tuple[int, str, int]:
    config = settings(folder, train=dict(steps=steps, schedule_steps=4), lr_schedule=dict(type="cosine"))
    config["checkpoint"] |= dict(every=2, resume="auto" if resume else None)
    engine = engine_of(config)
    summary = fit(engine)
    lr = engine.lr_at(1)
    engine.close()
    return summary.steps, summary.reason, lr


def test_more_steps_than_were_planned(tmp_path: Path) -> None:
    """A run that has ended goes on where train.steps is larger now; where it is not, it ends at once."""
    first = run_ranks(1, stops_later, tmp_path, 3, False, with_context=False)
    assert first[0][:2] == (3, "finished")
    ((steps, reason, _),) = run_ranks(1, stops_later, tmp_path, 3, True, with_context=False)
    assert (steps, reason) == (3, "finished")
    ((steps, reason, _),) = run_ranks(1, stops_later, tmp_path, 5, True, with_context=False)
    assert (steps, reason) == (5, "finished")
    assert sorted(path.name for path in tmp_path.glob("step-*")) == [name_of(3), name_of(4), name_of(5)]


def goes_back(rank: int, config: dict[str, Any]) -> tuple[list[float], list[float]]:
    """Saves, trains on, loads what it has saved, and trains on again."""
    engine = engine_of(config)
    engine.train_step(next(engine.loader))
    save = engine.checkpoints.save()
    losses = [engine.train_step(next(engine.loader)).loss for _ in range(2)]
    at = memory(engine)
    engine.checkpoints.load(save.wait().path)
    assert memory(engine) == at
    again = [engine.train_step(next(engine.loader)).loss for _ in range(2)]
    engine.close()
    return losses, again


def memory(engine: Any) -> set[int]:
    """Where momenta are."""
    kept = engine.optimizer.state.values()
    return {value.data_ptr() for of_param in kept for name, value in of_param.items() if name != "step"}


def test_a_run_goes_back_to_what_it_has_saved_in_the_same_memory(tmp_path: Path) -> None:
    for world, parallel in ((1, {}), (2, dict(data=2, zero=2))):
        for losses, again in run_ranks(world, goes_back, settings(tmp_path, parallel), with_context=False):
            assert losses == again
