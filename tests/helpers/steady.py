"""Whether anything grows while a plan trains, evaluates, saves, goes on from a checkpoint, or makes text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from helpers import server_threads
from helpers.holdings import Holdings, give_memory_back
from helpers.ranks import run_ranks
from helpers.training import config_of
from torch import Tensor

import colossus
from colossus.engine.engine import Engine
from colossus.engine.fit import Hook, fit
from colossus.engine.results import StepResult
from colossus.inference.config import find_source
from colossus.inference.decoding import generate
from colossus.inference.model import load_model

server_threads.in_threads()

#: large enough that an engine that stays, or a few activations of each step, are more than what comes and goes
SIZES: dict[str, Any] = dict(num_layers=4, hidden_size=48, num_heads=4, vocab_size=101, seq_len=12)


#: of evaluations, saves, and of what strategies do now and then
PERIOD = 4


class Sentences(torch.utils.data.Dataset[dict[str, Tensor]]):
    def __init__(self, split: str = "train") -> None:
        generator = torch.Generator().manual_seed(len(split))
        self.ids = torch.randint(0, SIZES["vocab_size"], (64, SIZES["seq_len"] + 1), generator=generator)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"inputs": self.ids[index, :-1], "labels": self.ids[index, 1:]}


@dataclass
class Case:
    """A plan on so many ranks, with what else its config says."""

    world: int
    plan: dict[str, Any]
    more: dict[str, Any] = field(default_factory=dict)

    def config(self, folder: Path, steps: int) -> dict[str, Any]:
        config = config_of(self.plan, steps, "fp32", **self.more)
        config["model"] = {**config["model"], **SIZES} if config["model"]["type"] == "GPT" else config["model"]
        config.setdefault("data", dict(type=Sentences))
        config["train"] |= dict(eval_every=PERIOD, eval_batches=1)
        config["checkpoint"] = dict(dir=str(folder), every=PERIOD, keep_last=1, resume="auto")
        config["comm"] = dict(log_size=4)  # what is remembered is full after a few steps
        return config


@dataclass(frozen=True)
class Length:
    """After how many steps, or prompts, holdings are compared, and over how many engines made and closed.

    Both steps lie alike between evaluations and saves, and neither is the last.
    """

    steps: tuple[int, int]
    engines: int

    def __post_init__(self) -> None:
        assert {step % PERIOD for step in self.steps} == {1}


class _Watch(Hook):
    """Compares what there is after some steps with what there was after the first of them."""

    def __init__(self, steps: tuple[int, ...]) -> None:
        self.holdings: dict[int, Holdings] = {}
        self._steps = steps

    def on_step_end(self, engine: Engine, result: StepResult) -> None:
        if result.step in self._steps:
            engine.checkpoints.finish()  # of the save under way
            self.holdings[result.step] = Holdings()


def growth_of_training(case: Case, length: Length, folder: Path) -> list[str]:
    """Return what grows on any rank, a line each: from the first to the last of the steps of one engine that evaluates
    and saves now and then, and from the first to the last of the engines, each of which goes on from the checkpoint of
    the one before."""
    first, last = length.steps

    def run(steps: int) -> _Watch:
        watch = _Watch((first, last))
        engine = colossus.initialize(case.config(folder, steps))
        fit(engine, [watch])
        engine.close()
        return watch

    def body(rank: int) -> list[str]:
        watch = run(last + 1)
        lines = _told(watch.holdings[last].growth_since(watch.holdings[first]), f"from step {first} to {last}")
        return lines + _growth_of_calls(run, range(last + 2, last + 2 + length.engines), "engines")

    return _on_all_ranks(case, body)


def growth_of_generation(case: Case, length: Length, folder: Path) -> list[str]:
    """Return what grows on any rank, a line each: over prompts, and over models loaded and closed."""
    saved = Case(1, {}, case.more).config(folder, 1)
    engine = colossus.initialize(saved)
    engine.checkpoints.save(background=False).wait()
    engine.close()
    first, last = length.steps

    def run(number: int) -> None:
        source = find_source(folder)
        sizes = [f"parallel.{axis}={size}" for axis, size in case.plan.items()]
        model = load_model(source, overrides=[*sizes, "device=cpu", "comm.log_size=4"])
        for _ in range(number):
            generate(model, [[1, 2, 3], [4, 5]], max_tokens=3)
        model.close()

    def body(rank: int) -> list[str]:
        run(first)
        before = Holdings()
        run(last)
        lines = _told(Holdings().growth_since(before), f"from prompt {first} to {last}")
        return lines + _growth_of_calls(run, [1] * length.engines, "models")

    return _on_all_ranks(case, body)


def _growth_of_calls(run: Callable[[int], Any], arguments: Any, what: str) -> list[str]:
    before: Holdings | None = None
    for argument in arguments:
        run(argument)
        before = before or Holdings()
    assert before is not None
    return _told(Holdings().growth_since(before), f"over {len(arguments)} {what}")


def _told(growth: list[str], where: str) -> list[str]:
    return [f"{where}: {line}" for line in growth]


def _on_all_ranks(case: Case, body: Callable[[int], list[str]]) -> list[str]:
    def run(rank: int) -> list[str]:
        give_memory_back()
        return body(rank)

    by_rank = run_ranks(case.world, run, with_context=False)
    return [f"rank {rank}: {line}" for rank, lines in enumerate(by_rank) for line in lines]
