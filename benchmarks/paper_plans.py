"""The planner's plans for models whose training was published, beside what was published.

    python -m benchmarks.paper_plans
    python -m benchmarks.paper_plans --only gpt3 --no-search

Of each case three lines: what was measured there; what is predicted here for the published plan, as far as our options
express it; the best plan that is found here on the same devices. Devices are data sheets, nothing of them is measured.
The sources stand beside the cases, and what of a plan is ours in `docs/planner.md`.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import common
from colossus.arithmetic import byte_count
from colossus.cli.plan_table import plan_words
from colossus.config import Config, load_config
from colossus.config.plans import world_size
from colossus.hardware.data_sheets import LINK_EFFICIENCY, NETWORK, NETWORK_STEP, FromDataSheet
from colossus.hardware.hardware import Link
from colossus.planner.estimate import Estimator
from colossus.planner.plan_estimate import PlanEstimate
from colossus.planner.search import search

FOLDER = Path(__file__).parent / "papers"
#: of each device: eight HDR InfiniBand cards for the eight A100 of a host of Selene (2205.05198)
HDR = Link(NETWORK_STEP, LINK_EFFICIENCY * 200e9 / 8)


@dataclass(frozen=True)
class Case:
    """A model that was trained on devices, eight in a host.

    Attributes:
        file: of `FOLDER`.
        overrides: the published plan; None where it was not published.
        speed: tokens per second and device, measured there.
        mfu: as published, or from what was.
        source: where.
    """

    name: str
    file: str
    device: str
    network: Link
    overrides: tuple[str, ...] | None
    speed: float | None
    mfu: float | None
    source: str

    def config(self, *overrides: str) -> Config:
        return load_config(FOLDER / f"{self.file}.py", overrides)

    @property
    def devices(self) -> int:
        return int(self.name.rpartition(" on ")[2].split()[0].replace(",", ""))


def _full(*others: str) -> tuple[str, ...]:
    return (*others, "train.activation_checkpoint=full")


_GPT_1024 = _full(
    "parallel.data=16", "train.global_batch_size=1536", "schedule.microbatches=96",
    "parallel.tensor.sequence_sharded=False",
)  # fmt: skip
_LONG = ("model.seq_len=131072", "train.global_batch_size=128")
CASES = (
    Case(
        "GPT-3 175B on 64 A100", "gpt3_175b", "a100", HDR, (),
        64 * 2048 / 13.75 / 64, 0.514, "2205.05198, table 5, present work: 13.75 s",
    ),
    Case(
        "GPT-3 175B, all recomputed, on 64 A100", "gpt3_175b", "a100", HDR,
        _full("parallel.tensor.sequence_sharded=False"),
        64 * 2048 / 18.13 / 64, 0.514 * 13.75 / 18.13, "2205.05198, table 5, full recompute: 18.13 s",
    ),
    # 140 TFLOP/s with a second forward: a step is 8 operations for each parameter and token instead of 6
    Case(
        "GPT-3 175B on 1,024 A100", "gpt3_175b", "a100", HDR, _GPT_1024,
        140e12 / (8 * 175e9), 140 / 312 * 6 / 8, "2104.04473, section 5.1: batch 1,536, 140 TFLOP/s; sizes not given",
    ),
    Case(
        "Llama 3 70B on 64 H100", "llama3_70b", "h100", NETWORK,
        ("parallel.data=2", "parallel.tensor.size=4", "parallel.pipeline=8", "parallel.zero=1",
         "schedule.type=interleaved", "schedule.chunks=5", "schedule.microbatches=64", "train.global_batch_size=128",
         "train.activation_checkpoint=none"),
        1619.0, None, "Megatron Bridge 25.09, fp8",
    ),
    Case(
        "Llama 3 70B on 256 H100", "llama3_70b", "h100", NETWORK, (),
        876.0, None, "torchtitan, December 2024, table 4, fp8, AsyncTP, H100 of 500 W and 96 GB",
    ),
    Case("Llama 3 70B on 512 H100", "llama3_70b", "h100", NETWORK, None, None, None, "-"),
    Case(
        "Llama 3 405B on 512 H100", "llama3_405b", "h100", NETWORK,
        _full("parallel.data=8", "parallel.pipeline=8", "parallel.zero=1", "schedule.microbatches=32",
              "schedule.chunks=2", "train.global_batch_size=256"),
        128.0, None, "torchtitan, December 2024, table 5, fp8, AsyncTP, interleaved, H100 of 500 W and 96 GB",
    ),
    Case("Llama 3 405B on 8,192 H100", "llama3_405b", "h100", NETWORK, (), None, 0.43, "2407.21783, table 4"),
    Case(
        "Llama 3 405B on 16,384 H100", "llama3_405b", "h100", NETWORK,
        ("parallel.data=128", "schedule.microbatches=16"), None, 0.41, "2407.21783, table 4",
    ),
    Case(
        "Llama 3 405B, 131,072 tokens, on 16,384 H100", "llama3_405b", "h100", NETWORK,
        (*_LONG, "parallel.data=8", "parallel.sequence=16", "schedule.microbatches=16"),
        None, 0.38, "2407.21783, table 4",
    ),
    Case(
        "DeepSeek-V3 671B on 2,048 H800", "deepseek_v3", "h800", NETWORK, (),
        272.80e9 / 86400 / 2048, 0.4373, "2505.09343, table 4, fp8: 19.926 s",
    ),
)  # fmt: skip


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"


def _cells(estimate: PlanEstimate, devices: int) -> list[str]:
    speed = estimate.tokens_per_second / devices
    return [
        _number(speed),
        _percent(estimate.mfu),
        byte_count(estimate.memory.fullest.total),
        plan_words(estimate.config),
    ]


def run(case: Case, *, searches: bool) -> list[list[str]]:
    """Return rows of what was published, of what is predicted for that plan, and of the best plan.

    A plan that does not fit is also predicted with full activation checkpointing; where none fits the nearest is a row.
    """
    hardware, hosts = FromDataSheet(case.device, network=case.network), max(1, case.devices // 8)
    rows = [[case.name, "published", _number(case.speed), _percent(case.mfu), "", case.source]]

    def add(what: str, plan: PlanEstimate | None) -> None:
        if plan is not None:
            rows.append(["", what, *_cells(plan, case.devices)])

    if case.overrides is not None:
        estimator, config = Estimator(hardware, hosts=hosts), case.config(*case.overrides)
        assert world_size(config.parallel) == case.devices, case.name
        published = estimator.estimate(config)
        add("that plan here", published)
        if published.memory.fullest.total > hardware.memory_bytes:
            add("that plan, recomputed", estimator.estimate(case.config(*_full(*case.overrides))))
    if searches:
        config = case.config(*(case.overrides or ()))
        result = search(config, hardware, devices=case.devices, hosts=hosts, top=1)
        add("best here", next(iter(result.plans), None))
        add("nearest here", result.nearest)
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="cases whose file or name has this in it")
    parser.add_argument("--no-search", action="store_true", help="only what is predicted for the published plans")
    args = parser.parse_args(argv)
    for case in CASES:
        if args.only.lower() not in f"{case.file} {case.name}".lower():
            continue
        header = ("case", "", "tokens/s/device", "MFU", "memory", "plan, or source")
        common.print_table("", header, run(case, searches=not args.no_search))


if __name__ == "__main__":
    main()
