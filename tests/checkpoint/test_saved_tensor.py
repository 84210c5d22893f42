"""docs/one-run.md: the functions through which a parameter goes to the disk."""

from __future__ import annotations

from pathlib import Path

import torch
from helpers.page_links import links, order_of_calls
from helpers.ranks import run_ranks
from torch import nn

import colossus
from colossus import layers

LINKED = links("one-run", "A saved tensor")
#: those of the way to the disk; the way back is told in one sentence
WAY = LINKED[: [name for name, _ in LINKED].index("restore")]


def _called(rank: int, root: Path) -> list[str]:
    settings = dict(
        parallel=dict(data=2, tensor=2),
        optimizer=dict(type="SGD", lr=0.1, momentum=0.9),
        train=dict(global_batch_size=4, precision="fp32"),
        checkpoint=dict(dir=str(root)),
        device="cpu",
    )

    def pair() -> nn.Module:
        return nn.Sequential(layers.Linear(6, 10, split="column"), nn.Tanh(), layers.Linear(10, 6, split="row"))

    engine = colossus.initialize(settings, model=pair, loss_fn=lambda y, batch: (y.square().sum(), y.shape[0]))
    engine.train_step(torch.ones(2, 6))
    with order_of_calls(WAY) as called:
        engine.checkpoints.save(background=True).wait()
    engine.close()
    return called


def test_a_save_calls_what_the_page_links_in_its_order(in_memory: Path) -> None:
    wanted = [name for name, _ in WAY]
    first, *others = run_ranks(4, _called, in_memory / "checkpoints", with_context=False)
    assert first == wanted
    assert all(called == wanted[:-1] for called in others)  # rank 0 alone completes it


def test_a_parameter_crosses_few_files() -> None:
    assert len({file for _, file in WAY}) <= 7
