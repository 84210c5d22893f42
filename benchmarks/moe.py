"""Experts spread over four ranks beside all experts on each of four data ranks.

    python -m benchmarks.moe

A chain of mixtures of experts (residual, top 2) under the engine, SGD; at routing that is nearly balanced, and at
skewed routing, where the first experts get most tokens. Time of the slowest rank; bytes that the ranks send in a step,
in the mean, counted, and those of tokens beside the formula (`colossus.layers.expert_rows.bytes_sent`); parameters and
gradients of a rank.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import colossus
from benchmarks import common
from benchmarks.common import Spread
from benchmarks.ranks import RankGroup
from colossus import layers
from colossus.comm import accounting
from colossus.layers.expert_rows import bytes_sent

RANKS, TOP_K = 4, 2
PLANS = {"data 4": dict(data=RANKS), "data 4, experts over 4": dict(data=RANKS, expert=RANKS)}
ROUTINGS = {"balanced": 0.0, "skewed": 1.0}


class Net(nn.Module):
    """Mixtures of experts, one after the other."""

    def __init__(self, hidden: int, ffn: int, experts: int, depth: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))  # so that the first layer's input has a gradient, too
        self.blocks = nn.ModuleList(layers.MoE(hidden, ffn, experts, TOP_K) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.scale
        for block in self.blocks:
            x = x + block(x)
        return x


def loss(out: Tensor, batch: Any) -> tuple[Tensor, int]:
    return out.square().sum(), out.shape[0] * out.shape[1]


class Worker:
    """One rank under a plan.

    Args:
        skew: by how much the score of an expert is above that of the next.
    """

    def __init__(self, plan: dict[str, int], sizes: tuple[int, ...], tokens: int, skew: float, rank: int) -> None:
        self.hidden, _, self.num_experts, _ = sizes
        config = dict(
            parallel=plan, optimizer=dict(type="SGD", lr=1e-9), train=dict(global_batch_size=RANKS), device="cpu"
        )
        self.engine = colossus.initialize(config, model=partial(Net, *sizes), loss_fn=loss)
        generator = torch.Generator().manual_seed(rank)
        self.x = torch.randn(1, tokens, self.hidden, generator=generator)
        self.x[..., 0] = 1.0
        with torch.no_grad():
            for block in self.engine.model.blocks:
                block.router.weight[:, 0] = -skew * torch.arange(self.num_experts)

    def time(self, steps: int) -> float:
        """Return the seconds of a step, behind one that is not timed."""
        self.engine.train_step(self.x)
        begin = time.perf_counter()
        for _ in range(steps):
            self.engine.train_step(self.x)
        return (time.perf_counter() - begin) / steps

    def numbers(self) -> dict[str, Any]:
        """Return the bytes that a step sends, in all and of tokens, each layer's choices of experts, and parameters."""
        with accounting.count() as moved:
            result = self.engine.train_step(self.x)
        routers = [block.router for block in self.engine.model.blocks]
        return {
            "bytes": moved.bytes(),
            "token_bytes": moved.bytes(operation="all_to_all tokens"),
            "chosen": [router.totals[: self.num_experts].int().tolist() for router in routers],
            "max_over_mean": max(layer["max_over_mean"] for layer in result.experts.values()),
            "parameter_bytes": sum(parameter.nbytes for parameter in self.engine.model.parameters()),
        }


def predicted(numbers: Sequence[dict[str, Any]], num_experts: int, row_bytes: int) -> list[int]:
    """Return the bytes of tokens that each rank sends in a step."""
    local, totals = num_experts // RANKS, [0] * RANKS
    for of_ranks in zip(*(of_rank["chosen"] for of_rank in numbers), strict=True):
        to = [[sum(counts[rank * local :][:local]) for rank in range(RANKS)] for counts in of_ranks]
        for rank in range(RANKS):
            own = sum(to[rank]) - to[rank][rank]
            others = sum(row[rank] for row in to) - to[rank][rank]
            totals[rank] += bytes_sent(own, others, RANKS, num_experts, row_bytes)[1]
    return totals


def main(argv: Sequence[str] | None = None) -> int:
    arguments = common.make_parser(__doc__, blocks=7).parse_args(argv)
    sizes, tokens, steps, blocks = (256, 512, 8, 4), 512, 3, arguments.blocks
    if arguments.smoke:
        sizes, tokens, steps, blocks = (16, 24, 8, 2), 32, 1, 2
    rows: list[list[object]] = []
    results: list[dict[str, Any]] = []
    for routing, skew in ROUTINGS.items():
        with ExitStack() as stack:
            groups = {
                name: stack.enter_context(RankGroup(name, RANKS, partial(Worker, plan, sizes, tokens, skew)))
                for name, plan in PLANS.items()
            }
            runners = {name: partial(group.slowest, "time", steps) for name, group in groups.items()}
            series = common.alternate(runners, blocks, label=f"{routing}:")
            of_ranks = {name: group.call("numbers") for name, group in groups.items()}
        for name, numbers in of_ranks.items():
            formula = predicted(numbers, sizes[2], sizes[0] * 4) if "experts" in name else [0] * RANKS
            counted = [of_rank["token_bytes"] for of_rank in numbers]
            if counted != formula:
                raise RuntimeError(f"{name}, {routing}: {counted} bytes of tokens, and {formula} by the formula")
            mean = {key: sum(of_rank[key] for of_rank in numbers) / RANKS / 1e6 for key in ("bytes", "token_bytes")}
            rows.append([
                f"{routing}: {name}", f"{numbers[0]['max_over_mean']:.2f}",
                f"{Spread.of(series[name]).median * 1e3:.0f}", common.ratio(series, name, next(iter(PLANS))),
                f"{mean['bytes']:.2f}", f"{mean['token_bytes']:.2f}", f"{numbers[0]['parameter_bytes'] / 1e6:.2f}",
            ])  # fmt: skip
            results.append({"routing": routing, "plan": name, "seconds": series[name], "ranks": numbers})
    header = ("routing, plan", "largest / mean", "ms a step", "/ data 4", "MB sent", "of tokens", "MB of parameters")
    hidden, ffn, experts, depth = sizes
    title = f"{depth} layers of {experts} experts, hidden {hidden}, ffn {ffn}, {tokens} tokens a rank, {blocks} blocks"
    common.print_table(title, header, rows)
    common.write_json(arguments.json, {"results": results})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
