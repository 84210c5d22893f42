"""The planner's plans for models whose training was published, beside what was published.

    python -m benchmarks.paper_plans
    python -m benchmarks.paper_plans --only gpt3 --no-search

For each case: the speed that was published, the speed that is predicted for that plan, as far as our options express
it, and the best plan that is found here on the same devices. Devices are data sheets, nothing of them is measured. The
sources stand beside the cases, and what differs in `docs/cost-model.md`.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
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
#: H100 of 500 W, 96 GB and 2.4 TB/s, whose peak is between those of H100 NVL (400 W) and SXM (700 W), in torchtitan's
#: words; here a third of the way, by watts
GRAND_TETON = dict(matmul=0.75 * (835.5 + (989.5 - 835.5) / 3) / 989.5, memory=96e9, memory_bandwidth=2.4e12)


@dataclass(frozen=True)
class Case:
    """A model that was trained on devices, eight in a host.

    Attributes:
        file: of `FOLDER`.
        device: name of a data sheet.
        overrides: the published plan; None where it was not published.
        speed: tokens per second and device, measured there; None where only ``mfu`` was published.
        mfu: as published.
        source: where.
        differs: what ran there and is not predicted, where it is more than a tenth of a step: the two are not compared.
        changed: figures of the device that differ from the sheet's.
    """

    name: str
    file: str
    device: str
    network: Link
    overrides: tuple[str, ...] | None
    speed: float | None
    mfu: float | None
    source: str
    differs: str = ""
    changed: Mapping[str, float] = field(default_factory=dict)

    def config(self, *overrides: str) -> Config:
        return load_config(FOLDER / f"{self.file}.py", overrides)

    @property
    def devices(self) -> int:
        return int(self.name.rpartition(" on ")[2].split()[0].replace(",", ""))

    @property
    def hosts(self) -> int:
        return max(1, self.devices // 8)

    def hardware(self, **changed: float) -> FromDataSheet:
        return FromDataSheet(self.device, self.network, **{**self.changed, **changed})

    def ratio(self, estimate: PlanEstimate) -> float | None:
        """Return a predicted speed over the published one."""
        if self.speed is not None:
            return estimate.tokens_per_second / self.devices / self.speed
        return estimate.mfu / self.mfu if estimate.mfu and self.mfu else None


def _full(*others: str) -> tuple[str, ...]:
    return (*others, "train.activation_checkpoint=full")


#: weights in bf16 beside masters in fp32, as Megatron keeps them
_MASTERS = "train.precision.params=bf16"
_WHOLE_TOKENS = "parallel.tensor.sequence_sharded=False"
_NO_TENSOR = ("parallel.tensor.size=1", _WHOLE_TOKENS)
_GPT_1024 = _full(
    _MASTERS, "parallel.data=16", "train.global_batch_size=1536", "schedule.microbatches=96", _WHOLE_TOKENS
)
_LONG = ("model.seq_len=131072", "train.global_batch_size=128")
_TITAN, _TITAN_A100 = "torchtitan, December 2024", "torchtitan, docs/performance.md of 2024"
CASES = (
    Case(
        "GPT-3 175B on 64 A100", "gpt3_175b", "a100", HDR, (_MASTERS,),
        64 * 2048 / 13.75 / 64, 0.514, "2205.05198, table 5, present work: 13.75 s",
    ),
    Case(
        "GPT-3 175B, all recomputed, on 64 A100", "gpt3_175b", "a100", HDR, _full(_MASTERS, _WHOLE_TOKENS),
        64 * 2048 / 18.13 / 64, 0.514 * 13.75 / 18.13, "2205.05198, table 5, full recompute: 18.13 s",
        differs="squares of attention through memory, dropout",
    ),
    # 140 TFLOP/s with a second forward: a step is 8 operations for each parameter and token instead of 6
    Case(
        "GPT-3 175B on 1,024 A100", "gpt3_175b", "a100", HDR, _GPT_1024,
        140e12 / (8 * 175e9), 140 / 312 * 6 / 8, "2104.04473, section 5.1: batch 1,536, 140 TFLOP/s; sizes not given",
        differs="plan not given; squares of attention through memory, dropout, gradients after backward",
    ),
    Case("Llama 3 8B on 64 A100", "llama3_8b", "a100", HDR, (), 2904.0, None, f"{_TITAN_A100}: selective layer"),
    Case(
        "Llama 3 70B on 64 A100", "llama3_70b", "a100", HDR,
        ("parallel.data=64", *_NO_TENSOR, "train.global_batch_size=64"), 331.0, None, _TITAN_A100,
    ),
    Case(
        "Llama 3 8B on 8 H100", "llama3_8b", "h100", NETWORK, ("parallel.data=8", "train.global_batch_size=16"),
        5762.0, None, f"{_TITAN}, table 1, FSDP", changed=GRAND_TETON,
    ),
    Case(
        "Llama 3 8B on 128 H100", "llama3_8b", "h100", NETWORK, ("parallel.data=128", "train.global_batch_size=256"),
        5605.0, None, f"{_TITAN}, table 3, FSDP", changed=GRAND_TETON,
    ),
    Case(
        "Llama 3 8B on 64 H100", "llama3_8b", "h100", NETWORK,
        ("parallel.data=8", "parallel.tensor.size=8", "parallel.tensor.sequence_sharded=True",
         "train.global_batch_size=96"),
        4378.0, None, "torchtitan, June 2025, bf16, vanilla TP, compiled", changed=GRAND_TETON,
    ),
    Case(
        "Llama 3 70B on 256 H100", "llama3_70b", "h100", NETWORK, (),
        597.3, None, "torchtitan, June 2025, bf16, vanilla TP, compiled", changed=GRAND_TETON,
    ),
    Case(
        "Llama 3 70B on 64 H100", "llama3_70b", "h100", NETWORK,
        ("parallel.data=2", "parallel.tensor.size=4", "parallel.pipeline=8", "parallel.zero=1",
         "schedule.type=interleaved", "schedule.chunks=5", "schedule.microbatches=64", "train.global_batch_size=128",
         "train.activation_checkpoint=none"),
        1619.0, None, "Megatron Bridge 25.09", differs="fp8",
    ),
    Case("Llama 3 70B on 512 H100", "llama3_70b", "h100", NETWORK, None, None, None, "-"),
    Case(
        "Llama 3 405B on 512 H100", "llama3_405b", "h100", NETWORK,
        _full("parallel.data=8", "parallel.pipeline=8", "parallel.zero=1", "schedule.microbatches=32",
              "schedule.chunks=2", "train.global_batch_size=256"),
        128.0, None, f"{_TITAN}, table 5, AsyncTP, interleaved", differs="fp8", changed=GRAND_TETON,
    ),
    Case(
        "Llama 3 405B on 8,192 H100", "llama3_405b", "h100", NETWORK, (_MASTERS,), None, 0.43, "2407.21783, table 4"
    ),
    Case(
        "Llama 3 405B on 16,384 H100", "llama3_405b", "h100", NETWORK,
        (_MASTERS, "parallel.data=128", "schedule.microbatches=16"), None, 0.41, "2407.21783, table 4",
    ),
    Case(
        "Llama 3 405B, 131,072 tokens, on 16,384 H100", "llama3_405b", "h100", NETWORK,
        (_MASTERS, *_LONG, "parallel.data=8", "parallel.sequence=16", "schedule.microbatches=16"),
        None, 0.38, "2407.21783, table 4", differs="another kernel of attention; which square MFU counts is not said",
    ),
    Case(
        "DeepSeek-V3 671B on 2,048 H800", "deepseek_v3", "h800", NETWORK, (),
        272.80e9 / 86400 / 2048, 0.4373, "2505.09343, table 4: 19.926 s", differs="fp8, DualPipe, groups of experts",
    ),
)  # fmt: skip


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"


def _cells(case: Case, plan: PlanEstimate) -> list[str]:
    ratio = case.ratio(plan)
    return [
        _number(plan.tokens_per_second / case.devices),
        _percent(plan.mfu),
        "" if ratio is None else f"{ratio:.2f}",
        byte_count(plan.memory.fullest.total),
        plan_words(plan.config),
    ]


def run(case: Case, *, searches: bool) -> list[list[str]]:
    """Return rows of what was published, of what is predicted for that plan, and of the best plan.

    A plan that does not fit is also predicted with full activation checkpointing; where none fits the nearest is a row.
    """
    rows = [[case.name, "published", _number(case.speed), _percent(case.mfu), "", "", case.source]]

    def add(what: str, plan: PlanEstimate | None) -> None:
        if plan is not None:
            rows.append(["", what, *_cells(case, plan)])

    hardware = case.hardware()
    if case.overrides is not None:
        estimator, config = Estimator(hardware, hosts=case.hosts), case.config(*case.overrides)
        assert world_size(config.parallel) == case.devices, case.name
        published = estimator.estimate(config)
        add("that plan here", published)
        if published.memory.fullest.total > hardware.memory_bytes:
            add("that plan, recomputed", estimator.estimate(case.config(*_full(*case.overrides))))
    if searches:
        config = case.config(*(case.overrides or ()))
        result = search(config, hardware, devices=case.devices, hosts=case.hosts, top=1)
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
        header = ("case", "", "tokens/s/device", "MFU", "here / published", "memory", "plan, or source")
        common.print_table("", header, run(case, searches=not args.no_search))


if __name__ == "__main__":
    main()
