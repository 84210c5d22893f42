"""Pictures of the pages on optimizers, learning rates and averages: what the code computes, and one small run.

``python docs/make_pictures.py`` writes them, too.
"""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from make_pictures import plain_svg, shorten

import colossus
from colossus.chart import Line, Panel, save_charts
from colossus.config import load_config
from colossus.config.batch_sizes import BatchRamp, BatchSizes
from colossus.config.learning_rates import LearningRates
from colossus.config.sections import Optimizer
from colossus.engine.parameter_groups import make_groups
from colossus.monitor.hooks.averages import EMA, SWA
from colossus.optim.muon import flops
from colossus.optim.owner_exchange import choose_owners
from colossus.picture import new_figure

COLOURS = ("#9ecae1", "#fdae6b", "#a1d99b", "#bcbddc")


def averages(path: Path) -> None:
    """Train a small regression with noisy gradients, and draw the losses of its weights and of their averages."""

    def batch(seed: int, size: int, noise: float) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(size, 16, generator=generator)
        return x, x[:, :4].sin().sum(1, keepdim=True) + noise * torch.randn(size, 1, generator=generator)

    def model() -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))

    torch.set_num_threads(1)  # nothing here is worth two
    config = dict(train=dict(global_batch_size=8, steps=1000), optimizer=dict(type="SGD", lr=0.05), device="cpu")
    engine = colossus.initialize(config, model=model, loss_fn=lambda y, batch: ((y - batch[1]).square().sum(), len(y)))
    hooks = {"EMA, half_life=50, warmup": EMA(half_life=50, warmup=True), "SWA, start=500": SWA(start=500)}
    curves: dict[str, tuple[list[int], list[float]]] = {name: ([], []) for name in ("weights", *hooks)}
    held_out = batch(0, 512, 0.0)
    for step in range(1, 1001):
        result = engine.train_step(batch(step, 8, 1.0))
        for hook in hooks.values():
            hook.on_step_end(engine, result)
        for name in curves if step % 20 == 0 else ():
            if name in hooks and not hooks[name].has_begun:
                continue
            with hooks[name].averaged(engine) if name in hooks else nullcontext():
                loss = engine.eval_step(held_out).loss
            curves[name][0].append(step)
            curves[name][1].append(loss)
    engine.close()
    figure = new_figure(8, 3.2)
    axis = figure.subplots()
    for (name, (steps, losses)), style in zip(curves.items(), ("-", "-", "--"), strict=True):
        axis.plot(steps, losses, style, label=name, linewidth=1.4)
    axis.set_yscale("log")
    for formatter in (axis.yaxis.set_major_formatter, axis.yaxis.set_minor_formatter):
        formatter(lambda value, _: f"{value:.2g}")
    axis.set_xlabel("step")
    axis.set_title("loss on data that is held out", fontsize=10, loc="left")
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)
    figure.savefig(path)


def owners(path: Path) -> None:
    """Draw the operations of the owners of matrices under Muon: 4 blocks on 8 ranks, a colour for each block."""
    hidden, blocks, ranks = 1024, 4, 8
    shapes = [(hidden, hidden)] * 4 + [(4 * hidden, hidden), (hidden, 4 * hidden)]
    costs = [flops(shape, 5) for _ in range(blocks) for shape in shapes]
    figure = new_figure(6, 2.6)
    axis, heights = figure.subplots(), [0.0] * ranks
    for number, owner in enumerate(choose_owners(costs, ranks)):
        block = number // len(shapes)
        axis.bar(owner, costs[number] / 1e9, bottom=heights[owner], color=COLOURS[block], edgecolor="white")
        heights[owner] += costs[number] / 1e9
    axis.set_xticks(range(ranks))
    axis.set_xlabel("rank")
    axis.set_title("operations of a step, 10^9", fontsize=10, loc="left")
    figure.savefig(path)


def learning_rates(path: Path) -> None:
    """Draw schedules of 200 steps, 20 of them a warm-up; a batch of 64 that grows."""
    steps = range(200)
    schedules: list[dict[str, Any]] = [
        dict(type="cosine", min_ratio=0.1),
        dict(type="wsd"),
        dict(type="wsd", decay=0.4, shape="1-sqrt"),
        dict(type="inverse_sqrt"),
        dict(type="step", every=60, gamma=0.5),
        dict(type="multistep", milestones=[0.4, 0.8], gamma=0.3),
        dict(type="cosine_restarts", cycles=2, mult=2),
        dict(type="polynomial", power=2),
    ]
    panels = []
    for schedule in schedules:
        own = dict(warmup_steps=20, **schedule)
        rates = LearningRates(load_config(dict(optimizer=dict(lr=1.0), train=dict(steps=len(steps)), lr_schedule=own)))
        title = ", ".join(str(value) if key == "type" else f"{key}={value!r}" for key, value in schedule.items())
        line = Line("", [step + 1 for step in steps], [rates.at(step) for step in steps])
        panels.append(Panel(title, [line], y_label="part of the peak"))
    sizes = BatchSizes(64, BatchRamp(start=16, steps=120))
    line = Line("", [step + 1 for step in steps], [sizes.at(step) for step in steps])
    save_charts([*panels, Panel("batch_ramp: start=16, steps=120", [line], y_label="sequences")], path)


def layer_decay(path: Path) -> None:
    """Draw the share of the learning rate that each layer of a GPT of 12 blocks has."""
    figure = new_figure(8, 2.6)
    axis = figure.subplots()
    with torch.device("meta"):
        model = torch.nn.Module()
        model.embedding = torch.nn.Embedding(256, 8)
        model.blocks = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(12)))
        model.head = torch.nn.Linear(8, 256)
    first = dict.fromkeys(["embedding.weight", *(f"blocks.{n}.weight" for n in range(12)), "head.weight"])
    for decay, colour in ((0.9, COLOURS[0]), (0.75, COLOURS[1])):
        groups = make_groups(Optimizer(layer_decay=decay), model)
        assert groups is not None
        shares = [groups.options[groups.group_of[name]]["lr_scale"] for name in first]
        axis.bar([at + (decay < 0.8) * 0.4 for at in range(len(first))], shares, 0.4, color=colour, label=f"{decay}")
    axis.set_xticks([at + 0.2 for at in range(len(first))], ["before", *map(str, range(12)), "behind"])
    axis.set_xlabel("block")
    axis.set_title("part of the learning rate, by layer_decay", fontsize=10, loc="left")
    axis.legend(fontsize=8)
    figure.savefig(path)


def write(folder: Path) -> None:
    """Write all of them into a folder."""
    with plain_svg():
        for draw in (averages, layer_decay, learning_rates, owners):
            path = folder / f"{draw.__name__.replace('_', '-')}.svg"
            draw(path)
            shorten(path)
