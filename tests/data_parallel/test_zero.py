"""ZeRO 1 to 3 under every kind of plan: the one-process run, in plain torch's steps."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from helpers.laws import assert_parity
from helpers.long import long
from helpers.ranks import run_ranks
from helpers.training import batch_of, config_of, run_plan, shared_run
from helpers.zero_memory import ParameterSize, ZeroMemory, zero_memory
from torch import Tensor, nn

import colossus
from colossus.comm import accounting
from colossus.data_parallel.zero.flat_rows import FlatRows
from colossus.data_parallel.zero.row_gradients import RowGradients
from colossus.data_parallel.zero.sharded_block import ShardedBlock
from colossus.layout.parameter import spec_of
from colossus.layout.split_parameter import local_shape
from colossus.state.model_state_dict import full_state_dict, load_full_state_dict

STAGES = (1, 2, 3)

#: ranks, parallel, schedule; all other products with ZeRO are in tests/test_parity.py
PLANS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "data4": (4, dict(data=4), dict(microbatches=2)),
    "hsdp": (4, dict(data=4, zero=dict(shard=2)), dict(microbatches=1)),
    "3d": (16, dict(data=2, tensor=dict(mode="3d", size=8)), dict(microbatches=1)),
}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "AdamW": dict(type="AdamW", lr=1e-3, weight_decay=0.1),
    "SGD": dict(type="SGD", lr=0.02, momentum=0.9, weight_decay=0.01),
}


def settings(
    plan: str | None, stage: int, precision: str = "fp64", steps: int = 3, optimizer: str = "AdamW", **zero: Any
) -> tuple[int, dict[str, Any]]:
    """Ranks and config; without a plan, of one process."""
    world, parallel, schedule = PLANS[plan] if plan else (1, {}, {})
    if plan:
        parallel = {**parallel, "zero": {**parallel.get("zero", {}), "stage": stage, **zero}}
    return world, config_of(
        parallel,
        steps,
        precision,
        schedule=schedule,
        lr_schedule=dict(type="cosine", warmup_steps=20 if precision == "fp32" else 2),
        optimizer=OPTIMIZERS[optimizer],
        train=dict(clip_grad_norm=0.5),
    )


def assert_is_one_process(plan: str, stage: int, optimizer: str, **zero: Any) -> None:
    world, config = settings(plan, stage, optimizer=optimizer, **zero)
    reference = shared_run(1, settings(None, 0, optimizer=optimizer)[1], 3)[0]
    assert_parity(run_plan(world, config, 3), reference, "fp64")


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("plan", ["hsdp", *long("data4", "3d")])
def test_every_stage_is_the_one_process_run(plan: str, stage: int) -> None:
    assert_is_one_process(plan, stage, "AdamW")


def test_rows_on_the_host() -> None:
    assert_is_one_process("data4", 2, "SGD", offload=True)


# -- what moves -----------------------------------------------------------------------------------------------


def _part(step: int, engine: colossus.Engine) -> dict[str, Tensor]:
    """This data rank's part of a batch."""
    index, count = engine.context.index("data"), engine.context.size("data")
    return {name: x.chunk(count)[index] for name, x in batch_of(step).items()}


def _counted(rank: int, configs: dict[str, dict[str, Any]]) -> dict[str, dict[tuple[str, str], tuple[int, float]]]:
    """Of each config, for the second step: (operation, axes) -> calls and bytes; and the elements of padded rows."""
    counts = {}
    for key, config in configs.items():
        engine = colossus.initialize(config)
        engine.train_step(_part(0, engine))
        with accounting.count() as moved:
            engine.train_step(_part(1, engine))
        kinds = [("all_gather", "shard"), ("reduce_scatter", "shard"), ("all_reduce", "replicate")]
        kinds += [(operation, axes.replace("shard", "data")) for operation, axes in kinds[:2]]
        counts[key] = {kind: (moved.calls(kind[1], kind[0]), moved.bytes(kind[1], kind[0])) for kind in kinds}
        stored = engine.store.parameters()
        counts[key]["rows"] = sum(local_shape(param).numel() for param in stored), len(stored)
        root = engine.store.blocks[0].params
        counts[key]["root"] = sum(local_shape(engine.store.stored(param)).numel() for param in root), len(root)
        engine.close()
    return counts


def test_bytes_over_each_axis() -> None:
    """Two float64 microbatches. Gathered and scattered is along ``shard``, summed along ``replicate``: rows only."""
    configs = {f"{plan} {stage}": settings(plan, stage)[1] for plan in ("data4", "hsdp") for stage in STAGES}
    configs["data4 step"] = {**configs["data4 3"], "parallel": dict(data=4, zero=3, tensor=dict(weights="step"))}
    configs["hsdp 3"]["schedule"] = dict(microbatches=2)
    for counts in run_ranks(4, _counted, configs, with_context=False):
        for key, moved in counts.items():
            (rows, num_params), (root, num_root) = moved["rows"], moved["root"]
            ranks, axis, other = (4, "data", "shard") if key.startswith("data4") else (2, "shard", "data")
            once = not key.endswith("3")
            # blocks for each of two microbatches: before forward, and again before backward, but for the last one
            gathers = rows if once else root + 4 * (rows - root)
            # with one flag of each parameter from each rank
            scatters = rows + num_params if once else 2 * (rows - root + num_params - num_root) + root + num_root
            assert moved["all_gather", axis][1] == (ranks - 1) * 8 * gathers, key
            assert moved["reduce_scatter", axis][1] == (ranks - 1) * 8 * scatters, key
            assert moved["all_gather", other][0] == moved["reduce_scatter", other][0] == 0
            if axis == "shard":
                assert moved["all_reduce", "replicate"][1] == pytest.approx(8 * (rows + num_params), rel=1e-9), key
            else:
                assert moved["all_reduce", "replicate"][0] == 0


def _low(rank: int, configs: dict[str, dict[str, Any]]) -> dict[str, tuple[list[float], dict[torch.dtype, float]]]:
    """Losses of three steps, and the bytes gathered in the last, by dtype."""
    runs = {}
    for key, config in configs.items():
        engine = colossus.initialize(config)
        losses = [engine.train_step(_part(step, engine)).loss for step in range(2)]
        with accounting.count() as moved:
            losses.append(engine.train_step(_part(2, engine)).loss)
        gathered = {dtype: tally.bytes for (kind, _, dtype), tally in moved.entries.items() if kind == "all_gather"}
        stored = {param.dtype for param in engine.store.parameters()}
        states = {x.dtype for state in engine.optimizer.state.values() for x in state.values() if x.dim()}
        assert stored == states == {torch.float32}
        assert all(param.grad.dtype == torch.float32 for param in engine.store.parameters())
        losses.append(engine.eval_step(_part(2, engine)).loss)
        runs[key] = losses, gathered
        engine.close()
    return runs


def test_low_precision_gathers_half_the_bytes() -> None:
    """Against one process in the same precision; norms travel in float32, and what products take in bfloat16."""
    configs = {
        f"{precision} {stage}": settings("data4", stage, precision)[1]
        for stage in (1, 3)
        for precision in ("fp32", "bf16")
    }
    for config in configs.values():
        config["parallel"]["data"] = 2
    (reference,) = run_ranks(1, _low, dict(one=settings(None, 0, "bf16")[1]), with_context=False)
    for runs in run_ranks(2, _low, configs, with_context=False):
        for stage in (1, 3):
            losses, gathered = runs[f"bf16 {stage}"]
            assert losses == pytest.approx(reference["one"][0], rel=2**-12)
            assert losses != pytest.approx(runs[f"fp32 {stage}"][0], rel=1e-7)
            whole = runs[f"fp32 {stage}"][1][torch.float32]
            assert gathered[torch.float32] + 2 * gathered[torch.bfloat16] == whole
            assert gathered[torch.float32] < 0.06 * whole


# -- state, evaluation, memory --------------------------------------------------------------------------------


def _loaded(rank: int, stages: tuple[int, ...]) -> list[Any]:
    """Losses of: a step, then with the first weights loaded again an evaluation, an uneven one, and the same step."""
    outcomes = []
    for stage in stages:
        _, config = settings("data4", stage)
        config["parallel"]["data"] = 2
        engine = colossus.initialize(config)
        start = full_state_dict(engine.model, engine.context)
        with torch.no_grad():  # outside of any step
            called = engine.model(batch_of(0)["inputs"])
        shapes = [tuple(param.shape) for param in engine.model.parameters()]
        first = engine.train_step(_part(0, engine)).loss
        engine.eval_step(_part(1, engine))
        load_full_state_dict(engine.model, start, engine.context)
        evaluated = engine.eval_step(_part(0, engine)).loss
        # the first rank has two batches of three samples, or none, where the second has one
        uneven = [
            engine.eval_step({name: x[:size] for name, x in batch_of(0).items()}).loss
            for size in ((5, 0)[rank], 3, (0, 2)[rank])[:3]
        ]
        assert [tuple(param.shape) for param in engine.model.parameters()] == shapes
        again = engine.train_step(_part(0, engine)).loss
        with torch.no_grad():
            last = engine.model(batch_of(0)["inputs"])
        outcomes.append((first, evaluated, again, uneven, called, last))
        engine.close()
    return outcomes


def test_states_are_loaded_and_evaluated() -> None:
    """Of every stage the same; whole copies follow what is loaded, and ranks may have unequal numbers of samples."""
    for outcomes in run_ranks(2, _loaded, STAGES, with_context=False):
        for first, evaluated, again, uneven, called, last in outcomes:
            assert first == evaluated == again
            assert uneven == outcomes[0][3]
            torch.testing.assert_close(called, outcomes[0][4], rtol=0, atol=0)
            torch.testing.assert_close(last, outcomes[0][5], rtol=1e-12, atol=1e-12)
            assert not torch.equal(called, last)


def _size(param: nn.Parameter) -> ParameterSize:
    rows = tuple(stop - start for start, stop in (shard.rows for shard in spec_of(param).shards))
    return ParameterSize(tuple(param.shape), rows, 2, 8, 8, 8, param.requires_grad)


def _bytes(tensors: list[Tensor | None]) -> int:
    """Of the memory behind some tensors, each once."""
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage() for x in tensors if x is not None}
    return sum(storage.nbytes() for storage in storages.values())


def _memory(rank: int, cases: list[tuple[dict[str, Any], dict[str, Any]]]) -> list[tuple[ZeroMemory, ZeroMemory]]:
    """What the formula says, and what is counted, of a run of two steps."""
    memories = []
    for config, options in cases:
        engine = colossus.initialize(config)
        blocks = [block for block in engine.store.blocks if block is not engine.store.blocks[0]]
        computed = [param for block in engine.store.blocks for param in block.params]
        sizes = [[_size(param) for param in block.params] for block in blocks]
        formula = zero_memory(sizes, [_size(param) for param in engine.store.blocks[0].params], **options)
        peak = [0, 0]
        take, start = FlatRows._take, RowGradients.start

        def measured(self: FlatRows, shards: list[Tensor]) -> None:
            take(self, shards)
            peak[0] = max(peak[0], _bytes([param.data for param in computed]))

        def reduced(self: RowGradients) -> None:
            peak[1] = max(peak[1], _bytes([param.grad for param in computed]))
            start(self)

        FlatRows._take, RowGradients.start = measured, reduced
        try:
            for step in range(2):
                engine.train_step(_part(step, engine))
        finally:
            FlatRows._take, RowGradients.start = take, start
        whole = [param.data for param in computed]
        stored = engine.store.parameters()
        states = [x for state in engine.optimizer.state.values() for x in state.values() if x.dim()]
        assert not any(param.grad is not None for param in computed)
        counted = ZeroMemory(
            stored=_bytes([*whole, *(param.data for param in stored)]) - _bytes(whole),
            whole=_bytes(whole),
            whole_peak=peak[0],
            gradients=sum(param.grad.nbytes for param in stored),
            gradients_peak=peak[1],
            optimizer=_bytes(states),
        )
        memories.append((formula, counted))
        engine.close()
    return memories


def test_memory_is_the_formula() -> None:
    """Storages alive between steps, and at most in a step: to the byte, each stage and scope, both optimizers."""
    variants = [
        (1, "matmul", False),
        (2, "matmul", False),
        (2, "matmul", True),
        (3, "matmul", False),
        (3, "microbatch", False),
        (3, "step", False),
    ]
    cases = []
    for number, (stage, scope, offload) in enumerate(variants):
        optimizer = ("AdamW", "SGD")[number % 2]
        _, config = settings("data4", stage, optimizer=optimizer, offload=offload)
        config["parallel"] |= dict(data=2, tensor=dict(weights=scope))
        config["model"] = {**config["model"], "num_layers": 4}
        cases.append((config, dict(stage=stage, scope=scope, states=2 - number % 2, offload=offload)))
    for memories in run_ranks(2, _memory, cases, with_context=False):
        for (_, options), (formula, counted) in zip(cases, memories, strict=True):
            assert replace(counted, gradients_peak=0) == replace(formula, gradients_peak=0), options
            # of the root block, some come after those of the others are gone
            is_exact = options["stage"] < 3 or options["scope"] == "step"
            lowest = formula.gradients_peak // (1 if is_exact else 2)
            assert lowest <= counted.gradients_peak <= formula.gradients_peak, options


# -- FSDP2 ----------------------------------------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(31, 10)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(10), nn.Linear(10, 17), nn.GELU(), nn.Linear(17, 10)) for _ in range(3)
        )
        self.head = nn.Linear(10, 31)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def _loss(logits: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    labels = batch["labels"].flatten()
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels, reduction="sum"), torch.tensor(labels.numel())


# -- while something else runs --------------------------------------------------------------------------------


class Turning(Net):
    """Blocks run in another order in every third forward, and not all of them in each fifth."""

    num_forwards = 0

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        self.num_forwards += 1
        blocks = list(self.blocks)[:: -1 if self.num_forwards % 3 == 0 else 1]
        for block in blocks[: 2 if self.num_forwards % 5 == 0 else 3]:
            x = x + block(x)
        return self.head(x)


@dataclass
class Watched:
    """Losses of five steps, each with an evaluation after it; of what follows, the last two.

    Attributes:
        ahead: of each block that was gathered, whether that was started before its use.
        inside: of each reduction, whether it began in backward.
        most_ahead: gathers under way at once.
        most_whole: blocks whole at once, the root aside.
    """

    losses: list[float] = field(default_factory=list)
    ahead: list[bool] = field(default_factory=list)
    inside: list[bool] = field(default_factory=list)
    most_ahead: int = 0
    most_whole: int = 0


def _watched(rank: int, parallel: dict[str, Any], model: type[nn.Module], recompute: str = "none") -> Watched:
    config = dict(
        parallel=parallel,
        optimizer=OPTIMIZERS["SGD"],
        train=dict(steps=5, global_batch_size=8, precision="fp64", seed=5, activation_checkpoint=recompute),
    )
    watched, gather, start = Watched(), ShardedBlock.gather, RowGradients.start

    def watched_gather(block: ShardedBlock) -> None:
        blocks = engine.store.blocks
        if not block.is_whole and block is not blocks[0]:
            watched.ahead.append(bool(block._gathers))
        gather(block)
        watched.most_ahead = max(watched.most_ahead, sum(bool(other._gathers) for other in blocks))
        watched.most_whole = max(watched.most_whole, sum(other.is_whole for other in blocks[1:]))

    def watched_start(gradients: RowGradients) -> None:
        watched.inside.append(torch._C._current_graph_task_id() != -1)
        start(gradients)

    ShardedBlock.gather, RowGradients.start = watched_gather, watched_start
    engine = colossus.initialize(config, model=model, loss_fn=_loss)
    for step in range(5):
        if step == 3:
            watched.ahead.clear()
            watched.inside.clear()
            watched.most_whole = 0
        ids = torch.randint(0, 31, (8, 6), generator=torch.Generator().manual_seed(step))
        ids = ids.chunk(engine.context.size("data"))[engine.context.index("data")]
        batch = dict(inputs=ids[:, :-1], labels=ids[:, 1:])
        watched.losses.append(engine.train_step(batch).loss)
        assert not any(block._gathers for block in engine.store.blocks), "an update follows"
        watched.losses.append(engine.eval_step(batch).loss)
    engine.close()
    ShardedBlock.gather, RowGradients.start = gather, start
    return watched


@pytest.mark.parametrize("model", [Net, Turning])
def test_blocks_are_gathered_ahead_and_reduced_in_backward(model: type[nn.Module]) -> None:
    losses = run_ranks(1, _watched, {}, model, with_context=False)[0].losses
    for stage in (2, 3):
        watched = run_ranks(2, _watched, dict(data=2, zero=stage), model, with_context=False)[0]
        assert watched.losses == pytest.approx(losses, rel=1e-10)
        assert watched.most_ahead <= 1
        if model is Net and stage == 2:  # one bucket of blocks, and the root's, both complete within backward
            assert watched.inside == [True, True] * 2
        elif model is Net:  # forward, backward, forward of an evaluation; three blocks, after them the root's gradients
            assert watched.ahead == [False, True, True] * 6
            assert watched.inside == [True, True, True, False] * 2


class Attended(nn.Module):
    """Six blocks that all take one tensor made before them, as decoders take what the encoder has made; in a list of
    lists. They return it, too."""

    num_used = 6

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.memory, self.head = nn.Embedding(31, 10), nn.Linear(10, 10), nn.Linear(10, 31)
        self.layers = nn.ModuleList(nn.ModuleList([Attending(10), Attending(10)]) for _ in range(3))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        memory = self.memory(x)
        for number, (first, second) in enumerate(self.layers):
            x, memory = first(x, memory, 2 * number < self.num_used)
            x, memory = second(x, memory)
        return self.head(x)


class Handed(Attended):
    """The fifth block only hands on its inputs."""

    num_used = 4


class Attending(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 17), nn.Linear(17, width)

    def forward(self, x: Tensor, memory: Tensor, is_used: bool = True) -> tuple[Tensor, Tensor]:
        return (x + self.down(torch.tanh(self.up(x * memory))), memory) if is_used else (x, memory)


@pytest.mark.rest("Attended-none-2")
@pytest.mark.parametrize(
    ("model", "recompute", "whole"), [(Attended, "none", 2), (Attended, "full", 2), (Handed, "none", 3)]
)
def test_few_blocks_that_share_an_input_are_whole_at_once(model: type[nn.Module], recompute: str, whole: int) -> None:
    """One that begins its backward, the one behind it, and one between them that does nothing."""
    losses = run_ranks(1, _watched, {}, model, with_context=False)[0].losses
    for watched in run_ranks(2, _watched, dict(data=2, zero=3), model, recompute, with_context=False):
        assert watched.losses == pytest.approx(losses, rel=1e-10)
        assert (len(watched.ahead), watched.most_whole) == (2 * 18, whole)
