"""Pictures of the page on the training toolbox: of what is computed, of small runs, and of rows that are made up."""

from __future__ import annotations

import json
import math
import random
import tempfile
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

import colossus
from colossus.chart import Line, Panel, save_charts
from colossus.cli.plot_panels import make_panels
from colossus.config import load_config
from colossus.config.batch_sizes import BatchRamp, BatchSizes
from colossus.config.learning_rates import LearningRates
from colossus.config.optimizer_section import Optimizer
from colossus.engine.parameter_groups import make_groups
from colossus.engine.results import EvalResult
from colossus.launch.run_metrics import RunMetrics
from colossus.monitor.hooks.averages import EMA, SWA
from colossus.monitor.hooks.best_checkpoint import BestCheckpoint
from colossus.monitor.hooks.early_stop import EarlyStop
from colossus.optim.muon import flops
from colossus.optim.owner_exchange import choose_owners
from colossus.picture import new_figure

COLOURS = ("#9ecae1", "#fdae6b", "#a1d99b", "#bcbddc")
DARK = "#333333"


def averages(path: Path) -> None:
    """What averages do to a run with a constant learning rate and noisy gradients: a small regression, really run."""

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
    found: dict[str, tuple[list[int], list[float]]] = {name: ([], []) for name in ("weights", *hooks)}
    held_out = batch(0, 512, 0.0)
    for step in range(1, 1001):
        result = engine.train_step(batch(step, 8, 1.0))
        for hook in hooks.values():
            hook.on_step_end(engine, result)
        for name in found if step % 20 == 0 else ():
            if name in hooks and not hooks[name].has_begun:
                continue
            with hooks[name].averaged(engine) if name in hooks else nullcontext():
                loss = engine.eval_step(held_out).loss
            found[name][0].append(step)
            found[name][1].append(loss)
    engine.close()
    figure = new_figure(8, 3.2)
    axis = figure.subplots()
    for (name, (steps, losses)), style in zip(found.items(), ("-", "-", "--"), strict=True):
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
    """What the owners of matrices compute under Muon: a GPT of 4 blocks on 8 ranks, each block in its colour."""
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
    """Schedules of 200 steps, 20 of them a warm-up where they have none of their own; a batch of 64 that grows."""
    steps = range(200)
    schedules: list[dict[str, Any]] = [
        dict(type="cosine", min_ratio=0.1),
        dict(type="wsd"),
        dict(type="wsd", decay=0.4, shape="1-sqrt"),
        dict(type="inverse_sqrt"),
        dict(type="step", every=60, gamma=0.5),
        dict(type="multistep", milestones=[0.4, 0.8], gamma=0.3),
        dict(type="cosine_restarts", cycles=2, mult=2),
        dict(type="one_cycle", warmup_steps=0),
    ]
    panels = []
    for schedule in schedules:
        own = {"warmup_steps": 20, **schedule}
        rates = LearningRates(load_config(dict(optimizer=dict(lr=1.0), train=dict(steps=len(steps)), lr_schedule=own)))
        title = ", ".join(str(value) if key == "type" else f"{key}={value!r}" for key, value in schedule.items())
        line = Line("", [step + 1 for step in steps], [rates.at(step) for step in steps])
        panels.append(Panel(title.removesuffix(", warmup_steps=0"), [line], y_label="part of the peak"))
    sizes = BatchSizes(64, BatchRamp(start=16, steps=120))
    line = Line("", [step + 1 for step in steps], [sizes.at(step) for step in steps])
    save_charts([*panels, Panel("batch_ramp: start=16, steps=120", [line], y_label="sequences")], path)


def plots(path: Path) -> None:
    """What ``colossus plot`` draws of two runs, whose rows are made up."""
    draw = random.Random(0)

    def row(step: int, tokens: int, seconds: float, floor: float, sent: dict[str, float]) -> dict[str, Any]:
        noise, loss = draw.gauss(0, 0.06), floor + 3.6 * math.exp(-step * tokens / 1.2e6)
        numbers = dict(step=step, tokens=tokens, loss=loss + noise, grad_norm=(0.4 + loss / 4) * math.exp(5 * noise))
        numbers |= dict(step_seconds=seconds, tokens_per_second=tokens / (seconds * (1 + abs(noise))))
        comm = {axis: dict(bytes=size) for axis, size in sent.items()}
        return numbers | dict(comm=comm) | (dict(validation_loss=loss + 0.05) if step % 50 == 0 else {})

    runs = {
        "batch=32": [row(step, 8192, 0.20, 1.62, {"data": 4.8e6, "tensor": 3.1e6}) for step in range(1, 501)],
        "batch=64": [row(step, 16384, 0.32, 1.70, {"data": 4.8e6, "tensor": 6.2e6}) for step in range(1, 251)],
    }
    with tempfile.TemporaryDirectory() as folder:
        metrics = {}
        for name, rows in runs.items():
            file = Path(folder, name)
            file.write_text("".join(json.dumps(each) + "\n" for each in rows))
            metrics[name] = RunMetrics(file)
        save_charts(make_panels(metrics, "tokens", 10, ["loss", "grad_norm", "throughput", "comm"]), path)


def early_stop(path: Path) -> None:
    """What EarlyStop and BestCheckpoint do on losses that are made up."""
    losses = [2.9, 2.2, 1.8, 1.55, 1.6, 1.42, 1.36, 1.39, 1.31, 1.34, 1.33, 1.36, 1.4, 1.45, 1.5]
    steps, saved, stops = [50 * (number + 1) for number in range(len(losses))], [], []
    stop, best = EarlyStop(patience=5), BestCheckpoint(keep=2)
    for step, loss in zip(steps, losses, strict=True):
        engine: Any = SimpleNamespace(
            context=SimpleNamespace(is_logging_rank=False),
            checkpoints=SimpleNamespace(save=lambda step=step: saved.append(step)),
            request_stop=lambda step=step: stops.append(step),
        )
        for hook in (stop, best):
            hook.on_eval_end(engine, EvalResult(loss, 1, step=step))
        if stops:
            break
    kept = [step for _, step in best.state_dict()["kept"]]
    figure = new_figure(8, 3)
    axis, number = figure.subplots(), steps.index(stops[0]) + 1
    axis.plot(steps[:number], losses[:number], color=COLOURS[0], marker=".", zorder=1)
    for at, size, colour, label in ((saved, 40, COLOURS[2], "saved"), (kept, 110, COLOURS[1], "kept: the two best")):
        axis.scatter(at, [losses[steps.index(step)] for step in at], s=size, color=colour, label=label, zorder=-size)
    axis.axvline(stops[0], color=DARK, linestyle=":", label="stopped: five are no better")
    axis.set_xlabel("step")
    axis.set_title("validation loss", fontsize=10, loc="left")
    axis.legend(fontsize=8)
    figure.savefig(path)


def layer_decay(path: Path) -> None:
    """The part of the learning rate that each layer of a GPT of 12 blocks has."""
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


def profile(path: Path) -> None:
    """What ``colossus plot --panels profile`` draws of a pipeline with few microbatches and with many: what 1F1B leaves
    idle of a step, the rest made up."""
    with tempfile.TemporaryDirectory() as folder:
        metrics = {}
        for microbatches in (2, 4, 16):
            run, step, idle = Path(folder, f"microbatches={microbatches}"), 0.6, 1 / (microbatches + 1)
            parts = {"forward": 0.31, "backward": 0.61, "optimizer": 0.05, "data wait": 0.03}
            seconds = {name: step * share for name, share in parts.items()}
            seconds["pipeline idle"] = step * idle / (1 - idle)
            (run / "profile").mkdir(parents=True)
            about = dict(steps=[1, 3], parts=list(seconds), ranks=[dict(rank=0, stage=0, seconds=seconds)])
            (run / "profile" / "summary.json").write_text(json.dumps(about))
            (run / "metrics.jsonl").write_text(json.dumps(dict(step=1, loss=1.0)) + "\n")
            metrics[run.name] = RunMetrics(run / "metrics.jsonl")
        save_charts(make_panels(metrics, "step", 1, ["profile"]), path)


def write(folder: Path) -> None:
    """All of them, into a folder that is there."""
    for draw in (averages, early_stop, layer_decay, learning_rates, owners, plots, profile):
        draw(folder / f"{draw.__name__.replace('_', '-')}.svg")
