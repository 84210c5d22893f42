"""Steps of the real engine, recorded without values and played on devices: what waits for collectives, and how long."""

from __future__ import annotations

from typing import Any, cast

import pytest
from helpers.fake_cuda import Waits, batch_on_device, run_fake_ranks
from helpers.real_sizes import LLAMA_8B, TOKENS_SPLIT, run_of
from helpers.training import BATCH, batch_of, config_of
from torch.utils._python_dispatch import _get_current_dispatch_mode

import colossus
from colossus.comm.pending import Ready
from colossus.config import load_config
from colossus.context.grid import ONE_RANK, build_grid
from colossus.hardware.data_sheets import FromDataSheet
from colossus.hardware.hardware import Hardware
from colossus.hardware.host_placement import Placement
from colossus.planner.device_play import (
    Call,
    DeviceEvent,
    DevicePlayer,
    DeviceRecord,
    PlayedStep,
    Read,
    note_read,
)
from colossus.planner.fake_step import fake_steps
from colossus.planner.trace import Awaited, Operator
from colossus.tensor_parallel import matmul

# -- the rules ------------------------------------------------------------------------------------------------------


class Seconds(FromDataSheet):
    """A device whose operators and collectives take as many seconds as they have bytes."""

    operator_seconds = 0.0

    def memory_seconds(self, num_bytes: float, operator: str = "") -> float:
        return num_bytes

    def collective_seconds(self, operation: str, ranks: int, input_bytes: float, *, hosts: int = 1) -> float:
        return input_bytes


def call(number: int, seconds: float, name: str = "data", ranks: tuple[int, ...] = (0, 1)) -> Call:
    return Call(number, "all_reduce", name, seconds, (name, ranks))


def play(*events: DeviceEvent, hardware: Hardware | None = None) -> PlayedStep:
    return DevicePlayer(hardware or Seconds("h100"), Placement(ONE_RANK)).play({0: events})[0]


WORK = Operator(3.0)


@pytest.mark.parametrize(
    ("events", "seconds", "exposed"),
    [
        ([WORK, call(1, 2), WORK, Awaited(1)], 6, 0),  # hidden
        ([WORK, call(1, 2), Awaited(1), WORK], 8, 2),  # waited for before the product
        ([call(1, 2), call(2, 2), Awaited(1), Awaited(2)], 4, 4),  # one after the other on one communicator
        ([call(1, 2), call(2, 2, "tensor"), Awaited(1), Awaited(2)], 2, 2),  # two communicators at once
        ([WORK, call(1, 2), WORK, call(2, 1), WORK, Awaited(2), Awaited(1)], 9, 0),
    ],
)
def test_what_a_collective_hides_behind(events: list[DeviceEvent], seconds: float, exposed: float) -> None:
    played = play(*events)
    assert (played.seconds, sum(played.exposed.values())) == (seconds, exposed)


class SlowHost(Seconds):
    operator_seconds = 2.0


def test_a_read_stalls_the_host_and_then_the_device() -> None:
    ahead = play(Operator(6.0), WORK, WORK, hardware=SlowHost("h100"))
    assert (ahead.seconds, ahead.stalled) == (12, 0)
    read = play(Operator(6.0), WORK, Read("here"), WORK, hardware=SlowHost("h100"))
    assert (read.seconds, read.stalled, read.reads) == (14, 8, ["here"])  # the last operator starts 2 seconds late


def test_a_message_starts_when_both_ranks_have_come() -> None:
    def message(number: int, operation: str) -> Call:
        return Call(number, operation, "pipeline", 1.0, ("pipeline", (0, 1)))

    sender = [Operator(5.0), message(1, "send"), Awaited(1)]
    receiver = [message(1, "receive"), Awaited(1), Operator(5.0)]
    played = DevicePlayer(Seconds("h100"), Placement(ONE_RANK)).play({0: sender, 1: receiver})
    assert [step.exposed["pipeline"] for step in played.values()] == [1.0, 1.0]  # of the second step
    assert [step.seconds for step in played.values()] == [6.0, 6.0]


# -- the engine -----------------------------------------------------------------------------------------------------

#: name -> run, and the exposed percent of its step at most: of a model of two layers, which hides less than a whole one
PLANS: dict[str, tuple[dict[str, Any], float]] = {
    "1d, tokens split": (run_of(LLAMA_8B, layers=2, tensor=TOKENS_SPLIT), 17.0),
    "data": (run_of(LLAMA_8B, layers=2, data=8), 8.0),
    "fsdp": (run_of(LLAMA_8B, layers=2, data=8, zero=3), 13.0),
    "zero 1": (run_of(LLAMA_8B, layers=2, data=8, zero=1), 12.5),
    "hsdp": (run_of(LLAMA_8B, layers=2, data=16, zero=dict(stage=3, shard=8)), 21.5),
    "hierarchical": (run_of(LLAMA_8B, layers=2, data=16, strategy=dict(type="hierarchical", per_host=8)), 11.0),
    "1d": (run_of(LLAMA_8B, layers=2, tensor=8), 9.0),
    "2d": (run_of(LLAMA_8B, layers=2, samples=2, tensor=dict(mode="2d", size=4)), 12.0),
    "2.5d": (run_of(LLAMA_8B, layers=2, samples=4, tensor=dict(mode="2.5d", size=8, depth=2)), 13.0),
    "3d": (run_of(LLAMA_8B, layers=2, samples=4, tensor=dict(mode="3d", size=8)), 20.0),
    "ulysses": (run_of(LLAMA_8B, layers=2, seq_len=32768, sequence=dict(size=8, mode="ulysses")), 12.0),
    "1f1b": (run_of(LLAMA_8B, layers=4, microbatches=4, pipeline=2), 58.0),
}
DEFAULT = ("1d, tokens split",)


def exposed_percent(run: dict[str, Any]) -> float:
    config = load_config(run)
    grid = build_grid(config.parallel)
    steps = fake_steps(config)
    player = DevicePlayer(FromDataSheet("h100"), Placement(grid, max(1, grid.world_size // 8)))
    played = player.play({step.rank: step.events for step in steps})
    return 100 * max(step.exposed_share for step in played.values())


@pytest.mark.parametrize(
    "name", [name if name in DEFAULT else pytest.param(name, marks=pytest.mark.long) for name in PLANS]
)
def test_collectives_hide_behind_products(name: str) -> None:
    run, most = PLANS[name]
    assert exposed_percent(run) <= most


def test_a_wait_before_its_product_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    run, most = PLANS["1d, tokens split"]
    start = matmul.run
    monkeypatch.setattr(matmul, "run", lambda *args, **options: Ready(start(*args, **options).wait()))
    assert exposed_percent(run) > most


class Reads(Waits):
    """Records what waits for the device."""

    def note(self, what: str) -> None:
        note_read()


def reads(rank: int, reads_a_number: bool) -> PlayedStep:
    engine = colossus.initialize(config_of(dict(data=2), 9, "bf16", device="cuda", model=dict(num_layers=1)))
    if reads_a_number:
        engine.model.register_forward_hook(lambda model, args, out: print(out.sum().item()))
    batch = batch_on_device({key: x[: BATCH // 2] for key, x in batch_of(0).items()})
    for _ in range(2):
        Waits.begin_step()
        record = DeviceRecord()
        with Reads(allowed=True), record.recording(cast(Any, _get_current_dispatch_mode())):
            engine.train_step(batch)
    engine.close()
    return play(*record.events, hardware=FromDataSheet("h100"))


def test_a_read_of_a_number_is_seen() -> None:
    (none,), (one,) = (run_fake_ranks(2, reads, reads_a_number) for reads_a_number in (False, True))
    assert (none.reads, none.stalled) == ([], 0)
    assert len(one.reads) == 1
    assert one.stalled > 0
    assert one.seconds > none.seconds
