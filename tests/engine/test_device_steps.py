"""Which steps wait for a CUDA device, and how often: none between logging steps, or as often as docs/gpus.md says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.fake_cuda import Waits, batch_on_device, files_of, run_fake_ranks
from helpers.long import long
from helpers.training import BATCH, batch_of, config_of
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

import colossus
from colossus import layers
from colossus.comm import collectives
from colossus.comm.host_transfer import HostRead
from colossus.config.schema import Parallel
from colossus.context.grid import build_grid
from colossus.context.parallel_context import ParallelContext
from colossus.data_parallel.zero.flat_rows import FlatRows
from colossus.engine import nonfinite
from colossus.engine.nonfinite import NonFiniteGradients

STEPS = 5
ONE_BLOCK = dict(model=dict(num_layers=1))
FEW_KV_HEADS = dict(type="Llama", num_layers=1, hidden_size=24, num_heads=4, num_kv_heads=2, vocab_size=53, seq_len=12)
PURE = dict(params="bf16", compute="bf16")
#: name -> plan, precision, more of the config
Case = tuple[dict[str, Any], Any, dict[str, Any]]

ONE: dict[str, Case] = {
    "fp32": ({}, "fp32", {}),
    "fp16": ({}, "fp16", {}),
    "pure bf16, values clipped": ({}, PURE, dict(train=dict(clip_grad_value=0.1, on_nonfinite="skip"))),
    "fp64": ({}, "fp64", {}),
    "SGD": ({}, "bf16", dict(optimizer=dict(type="SGD", lr=0.1, momentum=0.9))),
}
SEVERAL: dict[str, Case] = {
    "data": (dict(data=4), "bf16", dict(schedule=dict(microbatches=2))),
    "zero 1": (dict(data=4, zero=1), "fp16", {}),
    "zero 2": (dict(data=4, zero=2), "bf16", {}),
    "zero 3, pure bf16": (dict(data=4, zero=3), PURE, {}),
    "zero 3 by step": (dict(data=4, zero=3, tensor=dict(weights="step")), "fp32", {}),
    "zero 3 by microbatch": (
        dict(data=4, zero=3, tensor=dict(weights="microbatch")),
        "bf16",
        dict(schedule=dict(microbatches=2)),
    ),
    "hsdp": (dict(data=4, zero=dict(stage=3, shard=2)), "fp32", {}),
    "hierarchical": (dict(data=4, strategy=dict(type="hierarchical", per_host=2)), "fp32", {}),
    "compressed": (dict(data=4, strategy=dict(type="all_reduce", compress="bf16")), "fp32", {}),
    "powersgd": (dict(data=4, strategy=dict(type="all_reduce", compress="powersgd", start_step=1)), "fp32", {}),
    "copies compared": (dict(data=2, tensor=2), "fp32", dict(train=dict(check_replicas_every=2))),
    "copies of heads": (dict(tensor=4), "bf16", dict(model=FEW_KV_HEADS)),
}
#: with ``-m long`` only
LATER = {
    *("fp32", "fp64", "SGD", "data", "zero 2", "zero 3 by step", "zero 3 by microbatch", "hsdp", "compressed"),
    *("zero 1", "hierarchical", "powersgd", "copies of heads", "slowmo"),
}


def steps_of(engine: Any, batch: Any, num_steps: int = STEPS) -> list[list[str]]:
    """What waits in each step."""
    found = []
    for _ in range(num_steps):
        Waits.begin_step()
        with Waits(allowed=True) as waits:
            engine.train_step(batch)
        found.append(waits.found)
    return found


def gpt(rank: int, cases: dict[str, Case], num_steps: int = STEPS) -> dict[str, list[list[str]]]:
    found = {}
    for name, (plan, precision, more) in cases.items():
        try:
            engine = colossus.initialize(config_of(plan, 9, precision, device="cuda", **{**ONE_BLOCK, **more}))
            share = BATCH // engine.context.size("data")
            batch = batch_on_device({key: x[:share] for key, x in batch_of(0).items()})
            found[name] = steps_of(engine, batch, num_steps)
            engine.close()
        except BaseException as error:
            error.add_note(f"in the case {name!r}")
            raise
    return found


@pytest.mark.parametrize("kind", ["some", *long("all")])
def test_no_step_waits(kind: str) -> None:
    """But the first, which may be skipped where torch has no state of the optimizer yet."""
    for world, cases in ((1, ONE), (4, SEVERAL)):
        cases = {name: case for name, case in cases.items() if kind == "all" or name not in LATER}
        (found,) = run_fake_ranks(world, gpt, cases, 3)
        assert {name: steps[1:] for name, steps in found.items()} == {name: [[]] * 2 for name in cases}


# -- how far the host may be ahead ----------------------------------------------------------------------------------

STOPS, FINITE, AGREED = "optimizer_step.py", "nonfinite.py", "consistency.py"
#: world, case, and whose numbers of the step before a step reads
BOUNDED: dict[str, tuple[int, Case, list[str]]] = {
    "one process": (1, ({}, "fp32", {}), [FINITE, STOPS]),
    "zero 2": (2, (dict(data=2, zero=2), "bf16", {}), [AGREED, FINITE, STOPS]),
    "tensor: ranks share a batch": (2, (dict(tensor=2), "fp32", {}), [AGREED, AGREED, FINITE, STOPS]),
    "pipeline": (
        2,
        (dict(pipeline=2), "fp32", dict(schedule=dict(microbatches=2), model=dict(num_layers=2))),
        [AGREED, AGREED, FINITE, STOPS],
    ),
}


def bounds(rank: int, case: Case) -> list[list[tuple[int, str]]]:
    """Of each step: what it reads of steps before, as (how many before, file)."""
    plan, precision, more = case
    engine = colossus.initialize(config_of(plan, 9, precision, device="cuda", **{**ONE_BLOCK, **more}))
    share = BATCH // engine.context.size("data")
    batch = batch_on_device({key: x[:share] for key, x in batch_of(0).items()})
    found = []
    for _ in range(4):
        Waits.begin_step()
        with Waits(allowed=True) as waits:
            engine.train_step(batch)
        found.append([(age, line.partition(".py")[0].rpartition("/")[2] + ".py") for age, line in waits.bounds])
    engine.close()
    return found


@pytest.mark.parametrize("name", BOUNDED)
@pytest.mark.rest("pipeline", "tensor: ranks share a batch", "zero 2")
def test_each_step_reads_numbers_of_the_step_before_and_of_no_other(name: str) -> None:
    """So the host is at most one step ahead: what it waits for comes from the sums of the step before."""
    world, case, files = BOUNDED[name]
    (found,) = run_fake_ranks(world, bounds, case)
    assert found == [[], *[[(1, file) for file in files]] * 3]


class Verdict(HostRead):
    """Of each step, whether its gradients were not finite: of the second they were not, nor of the last."""

    COMING = iter([False, True, False, True])

    def wait(self) -> Tensor:
        with _disable_current_modes():
            return torch.tensor([next(self.COMING), False])


def told_late(rank: int) -> list[tuple[str, int, int]]:
    """Return where what is raised is caught: in which call, of which step, and how many steps are complete then."""
    nonfinite.HostRead = Verdict  # type: ignore[misc]
    engine = colossus.initialize(config_of({}, 9, "fp32", device="cuda", **ONE_BLOCK))
    batch, told = batch_on_device(batch_of(0)), []
    for call in ["step"] * 4 + ["save"]:
        try:
            with Waits(allowed=True):
                engine.train_step(batch) if call == "step" else engine.checkpoints.save()
        except NonFiniteGradients as error:
            told.append((call, error.step, engine.completed_steps))
    return told


def test_what_is_raised_late_is_raised_between_two_steps() -> None:
    """Of the second step behind the third, which is complete; of the last before it is saved."""
    (told,) = run_fake_ranks(1, told_late)
    assert told == [("step", 2, 3), ("save", 4, 4)]


# -- steps that wait ----------------------------------------------------------------------------------------------

ADAGRAD = dict(optimizer=dict(type="Adagrad"))
#: name -> case, and how often its steps wait, from the second on
WAITING: dict[str, tuple[Case, list[int]]] = {
    "not fused": ((dict(data=4), "fp32", ADAGRAD), [1] * 4),
    "lamb": ((dict(data=4), "bf16", dict(optimizer=dict(type="LAMB"))), [1] * 4),
    "zero 3 offloaded": ((dict(data=4, zero=dict(stage=3, offload=True)), "bf16", {}), [3] * 4),
    "zero 1 offloaded, fp16": (
        (
            dict(data=4, zero=dict(stage=1, offload=True)),
            "fp16",
            dict(train=dict(clip_grad_value=0.1)),
        ),
        [3] * 4,
    ),
    "local_sgd": ((dict(data=4, strategy=dict(type="local_sgd", period=3)), "bf16", {}), [0, 2, 0, 0]),
    "slowmo": ((dict(data=4, strategy=dict(type="slowmo", period=3)), "fp32", {}), [0, 2, 0, 0]),
    "diloco": (
        (dict(data=4, strategy=dict(type="diloco", period=4)), "fp16", dict(model=dict(num_layers=2))),
        [0, 0, 2, 0],
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("kind", ["some", "all"])
def test_the_steps_that_wait_do_it_as_often_as_is_said(kind: str) -> None:
    chosen = [name for name in WAITING if kind == "all" or name not in LATER]
    (found,) = run_fake_ranks(4, gpt, {name: WAITING[name][0] for name in chosen})
    assert {name: [len(waits) for waits in steps[1:]] for name, steps in found.items()} == {
        name: WAITING[name][1] for name in chosen
    }
    for step in found["zero 3 offloaded"]:
        assert [next(place for place in PLACES if place in wait) for wait in step] == PLACES


#: where a step with offloaded rows waits: for the gradients, for what they are divided by, whether all are finite
PLACES = ["parameter_store.py", "torch._foreach_mul_", "bool(found_inf)"]


def loss_fn(outputs: Tensor, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
    return F.cross_entropy(outputs, batch[1], reduction="sum"), len(outputs)  # a number: no copy that is waited for


def own(rank: int, model: Callable[[], nn.Module], plan: dict[str, Any], inputs: Tensor) -> list[list[str]]:
    config = dict(
        parallel=plan,
        optimizer=dict(type="SGD", lr=0.1),
        train=dict(steps=9, global_batch_size=4 * plan["data"]),
        device="cuda",
    )
    engine = colossus.initialize(config, model=model, loss_fn=loss_fn)
    batch = batch_on_device({"inputs": inputs, "labels": torch.zeros(4, dtype=torch.int64)})
    found = steps_of(engine, tuple(batch.values()))
    engine.close()
    return found[1:]


class Tables(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = layers.Embedding(37, 6, sparse=True), nn.Embedding(11, 6, sparse=True)
        self.out = nn.Linear(6, 5)

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.out((self.first(ids) + self.second(ids)).mean(1))
        return out


def test_tables_wait_for_their_ids() -> None:
    """Twice in a lookup (which ids are distinct, whether all are rows), once for the rows that others have touched;
    once in a step, since an update of rows cannot be left out on the device."""
    ids = torch.zeros(4, 3, dtype=torch.int64)
    (found,) = run_fake_ranks(2, own, Tables, dict(data=2), ids)
    assert [files_of(step) for step in found] == [{"sparse/table.py": 6, "data_parallel/strategy.py": 1}] * 4


def filling(rank: int, offload: bool) -> set[bool]:
    """Whether rows are copied into what is gathered on the stream of the products."""
    fill, found = FlatRows._fill, set()

    def note_and_fill(self: FlatRows, flat: Tensor) -> None:
        found.add(torch.cuda.current_stream() is torch.cuda.default_stream())
        fill(self, flat)

    FlatRows._fill = note_and_fill  # type: ignore[method-assign]
    engine = colossus.initialize(
        config_of(dict(data=4, zero=dict(stage=3, offload=offload)), 9, "bf16", device="cuda", **ONE_BLOCK)
    )
    engine.train_step(batch_on_device({key: x[: BATCH // 4] for key, x in batch_of(0).items()}))
    engine.close()
    return found


def test_rows_of_the_host_travel_beside_the_products() -> None:
    """Behind them, the products of a block would wait for the copies of the next one's rows."""
    assert [run_fake_ranks(4, filling, offload) for offload in (False, True)] == [[{True}], [{False}]]


# -- hosts ---------------------------------------------------------------------------------------------------------


def meet(rank: int) -> int:
    """How often the host waits at a barrier, after which ranks look at what others have left in the store."""
    context = ParallelContext(build_grid(Parallel(data=2)), rank, device="cuda")
    with Waits(allowed=True) as waits:
        collectives.barrier(context.group("data"), context.device)
    context.close()
    return len(waits.found)


def test_a_barrier_holds_the_host() -> None:
    assert run_fake_ranks(2, meet) == [1]


# -- batches of a loop of one's own --------------------------------------------------------------------------------
