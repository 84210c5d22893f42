"""One training run under many plans, each compared with plain torch in one process.

    python -m benchmarks.parity --plot docs/static/parity.svg

Every plan trains the same GPT on the same batches in float64. The reference is a loop in plain torch that knows nothing
of colossus (`benchmarks.peers.plain`). The last row is a control: one gradient is halved, so it must differ.
Nothing is timed, so a busy machine gives the same numbers.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.peers.ours import ColossusCase
from benchmarks.peers.plain import PlainCase
from benchmarks.ranks import RankGroup
from benchmarks.workload import Workload

STEPS = 20
WORKLOAD = Workload(hidden=64, layers=4, heads=8, tokens=64, batch=16)
#: name -> number of processes, the section ``parallel``, the section ``schedule``
PLANS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "data 4": (4, dict(data=4), {}),
    "data 4, ZeRO 1": (4, dict(data=4, zero=1), {}),
    "data 4, ZeRO 3": (4, dict(data=4, zero=3), {}),
    "tensor 4, 1D": (4, dict(tensor=4), {}),
    "tensor 4, 1D, tokens split": (4, dict(tensor=dict(size=4, sequence_sharded=True)), {}),
    "tensor 4, 2D": (4, dict(tensor=dict(mode="2d", size=4)), {}),
    "tensor 8, 2.5D": (8, dict(tensor=dict(mode="2.5d", size=8, depth=2)), {}),
    "tensor 8, 3D": (8, dict(tensor=dict(mode="3d", size=8)), {}),
    "sequence 4, ring": (4, dict(sequence=dict(size=4, mode="ring")), {}),
    "sequence 4, Ulysses": (4, dict(sequence=dict(size=4, mode="ulysses")), {}),
    "pipeline 4, 1F1B": (4, dict(pipeline=4), dict(type="1f1b", microbatches=8)),
    "pipeline 2, ZB-V": (2, dict(pipeline=2), dict(type="zb-v", microbatches=8)),
    "data 2 x pipeline 2 x tensor 2": (8, dict(data=2, pipeline=2, tensor=2), dict(type="1f1b", microbatches=4)),
    "data 2 x tensor 4 (2D), ZeRO 3": (8, dict(data=2, tensor=dict(mode="2d", size=4), zero=3), {}),
}
CONTROL = "control: one gradient halved"
DAMAGED = "blocks.1.mlp_norm.weight"
COMPARED = "any loss or gradient norm"


def train_plain(workload: Workload, steps: int) -> list[tuple[float, float]]:
    """Return the loss and the gradient norm of each step of the loop in plain torch."""
    case = PlainCase(workload, 0, 1)
    case.model.double()
    return [case.step(index) for index in range(steps)]


class PlanRun(ColossusCase):
    """A rank of a run under a plan.

    Args:
        damaged: a parameter whose gradient is halved.
    """

    def __init__(self, rank: int, parallel: dict[str, Any], schedule: dict[str, Any], damaged: str | None) -> None:
        super().__init__(WORKLOAD, rank, 0, parallel=parallel, schedule=schedule, precision="fp64")
        if damaged is not None:
            self.engine.model.get_parameter(damaged).register_hook(lambda gradient: gradient * 0.5)

    def train(self, steps: int) -> list[tuple[float, float]]:
        """Return the loss and the gradient norm of each step."""
        return [self.step(index) for index in range(steps)]


def largest_difference(run: list[tuple[float, float]], reference: list[tuple[float, float]]) -> float:
    """Return the largest relative difference of any loss or gradient norm."""
    pairs = zip(sum(run, ()), sum(reference, ()), strict=True)
    return max(abs(value - wanted) / abs(wanted) for value, wanted in pairs)


def compare_plans(steps: int) -> dict[str, float]:
    """Return the largest difference of each plan from plain torch, and that of the control."""
    reference = train_plain(WORKLOAD, steps)
    cases = {name: (*plan, None) for name, plan in PLANS.items()} | {CONTROL: (2, dict(data=2), {}, DAMAGED)}
    differences = {}
    for name, (world, parallel, schedule, damaged) in cases.items():
        make = partial(PlanRun, parallel=parallel, schedule=schedule, damaged=damaged)
        with RankGroup(name, world, make) as ranks:
            differences[name] = max(largest_difference(run, reference) for run in ranks.call("train", steps))
        print(f"{name:34} {differences[name]:.1e}", flush=True)
    return differences


def draw(differences: Mapping[str, float], steps: int) -> str:
    """Return an SVG with a dot for each plan on a logarithmic axis."""
    start, right, row, top = 250, 770, 22, 62
    lowest, highest = -17, 0
    bottom = top + row * len(differences)

    def x(exponent: float) -> float:
        return start + (right - start) * (exponent - lowest) / (highest - lowest)

    def text(at: float, y: float, words: str, anchor: str, size: int = 12) -> str:
        return f'<text x="{at:g}" y="{y:g}" text-anchor="{anchor}" font-size="{size}">{words}</text>'

    shapes = [
        text(16, 22, f"{len(differences) - 1} plans, one training run", "start", 15),
        text(16, 42, f"largest relative difference from plain torch in {COMPARED}, {steps} steps, float64", "start"),
    ]  # fmt: skip
    for exponent in range(-16, 1, 2):
        at = x(exponent)
        shapes.append(f'<line x1="{at:g}" y1="{top - 8}" x2="{at:g}" y2="{bottom}" stroke="#dddddd"/>')
        shapes.append(text(at, bottom + 18, "1" if exponent == 0 else f"1e{exponent}", "middle"))
    for number, (name, difference) in enumerate(differences.items()):
        y = top + row * number + 8
        at = x(max(lowest, math.log10(difference))) if difference else x(lowest)
        colour = "#d62728" if name == CONTROL else "#1f77b4"
        shapes.append(text(start - 14, y + 4, name, "end"))
        shapes.append(f'<line x1="{start}" y1="{y}" x2="{at:.1f}" y2="{y}" stroke="{colour}" stroke-width="2"/>')
        shapes.append(f'<circle cx="{at:.1f}" cy="{y}" r="5" fill="{colour}"/>')
        shapes.append(text(at + 10, y + 4, f"{difference:.0e}", "start", 11))
    width, height = right + 40, bottom + 30
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'font-family="Helvetica, Arial, sans-serif" fill="#333333">'
    )
    return "\n".join([head, f'<rect width="{width}" height="{height}" fill="white"/>', *shapes, "</svg>", ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plot", type=Path, metavar="FILE", help="SVG to write")
    parser.add_argument("--steps", type=int, default=STEPS, metavar="N", help=f"steps of each run (default: {STEPS})")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    differences = compare_plans(arguments.steps)
    if arguments.plot is not None:
        arguments.plot.write_text(draw(differences, arguments.steps))


if __name__ == "__main__":
    main()
