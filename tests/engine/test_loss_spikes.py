"""A loss spike ends the step; the run goes back, leaves batches out once, and what follows does not see them again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.ranks import run_ranks
from helpers.small_run import Numbers, everything, make_engine
from torch import Tensor
from torch.utils.data import IterableDataset

from colossus.checkpoint.errors import CheckpointError
from colossus.checkpoint.folder import checkpoint_steps
from colossus.config import ConfigError
from colossus.config.training import LossSpikes
from colossus.engine.engine import Engine
from colossus.engine.fit import fit
from colossus.engine.loss_spikes import LossSpike, SpikeWatch
from colossus.engine.results import StepResult
from colossus.engine.rollback import Rollback

STEPS = 6


# -- what is a spike ------------------------------------------------------------------------------------------


def watched(losses: list[float], **section: Any) -> LossSpike | None:
    """The error of the last step of a run with these losses."""
    section = dict(factor=3.0, window=3) | section
    watch = SpikeWatch(LossSpikes(**section), SimpleNamespace(exact=True))  # type: ignore[arg-type]
    results = [
        StepResult(step, 0.1, torch.tensor([2.0 * loss, 2.0, 1.0, 0.0], dtype=torch.float64))
        for step, loss in enumerate(losses, 1)
    ]
    for result in results[:-1]:
        watch.after_step(result)
    try:
        watch.after_step(results[-1])
    except LossSpike as error:
        return error
    return None


def test_a_loss_far_above_the_median_is_a_spike() -> None:
    error = watched([1.0, 9.0, 2.0, 6.1])
    assert error is not None
    assert "the loss of step 4 is 6.1, more than 3 times 2, the median of the 3 steps before" in str(error)
    assert error.rollback == Rollback(3, None)
    assert watched([1.0, 9.0, 2.0, 6.0]) is None
    assert watched([1.0, 1.0, 4.0]) is None, "too few losses were seen"


def test_the_median_is_of_the_last_losses() -> None:
    rising = [2.0**power for power in range(12)]
    assert watched(rising, factor=4.1) is None
    assert watched([*rising, 4096.0 * 3], factor=4.1) is not None


def test_what_is_no_number_is_passed_over() -> None:
    assert watched([1.0, float("nan"), 1.0, float("inf"), 1.0, float("nan")]) is None
    assert watched([1.0, float("nan"), 1.0, float("inf"), 1.0, 3.1]) is not None


class OnDevice(StepResult):
    """Its numbers are there when the next step is over."""

    def send_to_host(self) -> bool:
        super().send_to_host()
        return True


def test_on_an_accelerator_a_spike_is_seen_one_step_later() -> None:
    watch = SpikeWatch(LossSpikes(factor=3.0, window=1), SimpleNamespace(exact=True))  # type: ignore[arg-type]
    results = [
        OnDevice(step, 0.1, torch.tensor([loss, 1.0, 1.0, 0.0])) for step, loss in ((1, 1.0), (2, 4.0), (3, 1.0))
    ]
    watch.after_step(results[0])
    watch.after_step(results[1])
    with pytest.raises(LossSpike, match="the loss of step 2 is 4") as error:
        watch.after_step(results[2])
    assert error.value.rollback == Rollback(1, None)


def test_losses_that_are_not_above_zero_are_not_judged() -> None:
    assert watched([-1.0, -1.0, -1.0, -0.9, -5.0, 7.0]) is None
    assert watched([0.0, 0.0, 0.0, 1e-9]) is None


def test_what_follows_is_as_the_config_has_it() -> None:
    ends, leaves_out = (watched([1.0] * 3 + [9.0], **keys) for keys in ({"action": "raise"}, {"skip_batches": 7}))
    assert ends is not None
    assert ends.rollback is None
    assert leaves_out is not None
    assert leaves_out.rollback == Rollback(3, 7)


def test_replicas_with_losses_of_their_own_are_refused() -> None:
    with pytest.raises(ValueError, match="each replica has a loss of its own"):
        SpikeWatch(LossSpikes(factor=2.0), SimpleNamespace(exact=False))  # type: ignore[arg-type]


# -- going back -----------------------------------------------------------------------------------------------


class Once(IterableDataset[Tensor]):
    """Cannot seek, and gives nothing when it is read again."""

    def __init__(self) -> None:
        self._samples: Iterator[Tensor] = iter(Numbers().values[:40])

    def __iter__(self) -> Iterator[Tensor]:
        yield from self._samples


class Stream(IterableDataset[Tensor]):
    """Cannot seek; three batches and a half."""

    def __iter__(self) -> Iterator[Tensor]:
        yield from Numbers().values[:28]


def go_on(root: Path, *order: Any, resume_from: str | None = None, steps: int = STEPS, **more: Any) -> Engine:
    """An engine of ranks that were started again, behind `resume`; ``order``: until, batches to skip, when."""
    engine = make_engine(root, every=2, steps=steps, background=False, data=1, **more)
    engine.checkpoints.is_restart, engine.checkpoints.resume_from = True, resume_from
    if order:
        engine.checkpoints.rollback = Rollback(*order)
    engine.checkpoints.resume()
    return engine


def places(engine: Engine) -> tuple[int, int]:
    """Steps done, batches passed."""
    return engine.completed_steps, engine.loader.step


def run(root: Path, steps: int = STEPS, left_out: tuple[int, int] | None = None, **more: Any) -> list[Any]:
    """All state of an undisturbed run; ``left_out``: behind which step so many batches are."""
    engine = make_engine(root, every=2, steps=steps, background=False, data=1, **more)
    for batch in engine.loader:
        engine.train_step(batch)
        if left_out is not None and engine.completed_steps == left_out[0]:
            engine.loader.set_step(engine.loader.step + left_out[1])
        engine.checkpoints.after_step(is_last=engine.completed_steps == steps)
        if engine.completed_steps == steps:
            break
    found = everything(engine)
    engine.close()
    return found


def alone(body: Any, *args: Any) -> Any:
    return run_ranks(1, lambda rank: body(*args), with_context=False)[0]


def steps_of(root: Path) -> list[int]:
    return sorted(checkpoint_steps(root).values())


@pytest.mark.rest("1-1-Stream", "30-30-Numbers", "None-2-Stream")
@pytest.mark.parametrize("data", [Numbers, Stream])
@pytest.mark.parametrize(("skip", "skipped"), [(None, 2), (1, 1), (30, 30)])
def test_a_run_that_goes_back_is_one_that_left_the_batches_out(
    tmp_path: Path, data: Any, skip: int | None, skipped: int
) -> None:
    def body() -> None:
        wanted = run(tmp_path / "plain", left_out=(2, skipped), train_data=data)
        run(tmp_path / "ckpt", 4, train_data=data)
        engine = go_on(tmp_path / "ckpt", 3, skip, 1.0, train_data=data)  # step 4 was a spike
        assert places(engine) == (2, 2 + skipped)
        assert steps_of(tmp_path / "ckpt") == [2]
        fit(engine)
        assert everything(engine) == wanted
        engine.close()

    alone(body)


def test_batches_are_left_out_once(tmp_path: Path) -> None:
    """A rank dies before the others have trained, and the launcher gives the order again; then it gives no order."""

    def body() -> None:
        root = tmp_path / "ckpt"
        run(root, 4)
        for _ in range(2):
            engine = go_on(root, 3, None, 1.0)
            assert places(engine) == (2, 4)
            engine.close()
        engine = go_on(root)
        assert places(engine) == (2, 4)
        fit(engine)
        engine.close()
        for resume_from in (None, "auto"):
            engine = go_on(root, resume_from=resume_from)
            assert places(engine) == (STEPS, STEPS + 2)
            engine.close()

    alone(body)


def test_each_spike_leaves_batches_out(tmp_path: Path) -> None:
    def body() -> None:
        root = tmp_path / "ckpt"
        run(root, 4)
        seen = []
        for until, skip, when in ((3, 1, 1.0), (2, 1, 2.0), (2, None, 3.0)):
            engine = go_on(root, until, skip, when)
            seen.append(places(engine))
            engine.close()
        assert seen == [(2, 3), (2, 4), (2, 5)]

    alone(body)


def test_copies_that_differ_leave_no_batch_out(tmp_path: Path) -> None:
    def body() -> None:
        wanted = run(tmp_path / "plain")
        run(tmp_path / "ckpt")
        engine = go_on(tmp_path / "ckpt", 5, 0, 1.0)
        assert places(engine) == (4, 4)
        assert steps_of(tmp_path / "ckpt") == [2, 4]
        fit(engine)
        assert everything(engine) == wanted
        engine.close()

    alone(body)


def test_a_spike_before_the_first_checkpoint(tmp_path: Path) -> None:
    """The run begins anew, where it had begun: at its first step, or behind a checkpoint of another run."""

    def body() -> None:
        wanted = run(tmp_path / "plain", left_out=(2, 1))
        engine = go_on(tmp_path / "first", 0, None, 1.0)
        assert places(engine) == (0, 1)
        engine.close()
        assert places(go_on(tmp_path / "first")) == (0, 1)

        run(tmp_path / "other", 2)
        before = str(tmp_path / "other" / "step-00000002")
        engine = go_on(tmp_path / "ckpt", 2, None, 1.0, resume_from=before)
        assert places(engine) == (2, 3)
        assert steps_of(tmp_path / "ckpt") == [2]
        fit(engine)
        assert everything(engine) == wanted
        engine.close()

    alone(body)


def test_what_is_left_is_not_thrown_away(tmp_path: Path) -> None:
    """The checkpoints before the error were pruned."""

    def body() -> str:
        run(tmp_path / "ckpt", 8, keep_last=1)
        with pytest.raises(CheckpointError) as error:
            go_on(tmp_path / "ckpt", 6, 0, 1.0)
        assert steps_of(tmp_path / "ckpt") == [8]
        return str(error.value)

    message = alone(body)
    assert "must go back to step 6 or before, but has only later checkpoints: step-00000008" in message
    assert "checkpoint.keep_last (now 3)" in message


def test_data_that_ends_is_told(tmp_path: Path) -> None:
    def body() -> str:
        run(tmp_path / "ckpt", 2, train_data=Once)
        with pytest.raises(ValueError, match="Once ends with batch") as error:
            go_on(tmp_path / "ckpt", 3, 9, 1.0, train_data=Once)
        return str(error.value)

    assert "Once ends with batch 5, before batch 11 is reached" in alone(body)


def test_a_loader_of_ones_own_is_refused(tmp_path: Path) -> None:
    class Own:
        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state: Any) -> None:
            pass

    def body() -> str:
        run(tmp_path / "ckpt", 2)
        engine = make_engine(tmp_path / "ckpt", every=2, data=1)
        assert engine.loaders is not None
        object.__setattr__(engine.loaders, "train", Own())
        engine.checkpoints.is_restart, engine.checkpoints.rollback = True, Rollback(2, None, 1.0)
        with pytest.raises(ConfigError) as error:
            engine.checkpoints.resume()
        return str(error.value)

    assert "no batches can be left out of a Own that replaces" in alone(body)
