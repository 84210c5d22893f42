"""The measurements of each plan, as a table and as JSON with the times of all blocks. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean
from typing import TYPE_CHECKING, Any

from rich.console import Console

from colossus.arithmetic import byte_count
from colossus.compare.interleaved import Spread, ratio
from colossus.compare.printed_rows import print_lines, print_rows, seconds_text

if TYPE_CHECKING:
    from colossus.compare.timed_steps import Block


@dataclass
class Measured:
    """A plan and its measurements.

    Attributes:
        plan: the plan with its sizes, in words.
        threads: threads of each rank.
        blocks: for each block, the measurements of all ranks.
        failure: one line that says why the plan failed; None while it has not.
    """

    label: str
    plan: str
    ranks: int
    threads: int
    blocks: list[list[Block]] = field(default_factory=list)
    failure: str | None = None

    @property
    def seconds(self) -> list[float]:
        """Seconds of a step in each block, on its slowest rank."""
        return [max(rank.seconds for rank in block) for block in self.blocks]

    @property
    def tokens(self) -> float:
        """Tokens of a step."""
        return fmean(block[0].tokens for block in self.blocks)

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / Spread.of(self.seconds).median

    @property
    def mfu(self) -> float | None:
        ideal = [block[0].ideal_seconds for block in self.blocks]
        measured = [seconds for seconds in ideal if seconds is not None]
        return fmean(measured) / Spread.of(self.seconds).median if measured else None

    @property
    def sent(self) -> dict[str, float]:
        """Axis -> bytes that a rank sends along it in a step, on the rank that sends most."""
        ranks = range(self.ranks)
        axes = sorted({axis for block in self.blocks for rank in block for axis in rank.sent})
        return {axis: max(fmean(_bytes(block[rank], axis) for block in self.blocks) for rank in ranks) for axis in axes}

    @property
    def peak_memory(self) -> int:
        """Peak memory of the fullest rank in bytes."""
        return max(rank.peak_memory for rank in self.blocks[-1])


def _bytes(block: Block, axis: str) -> float:
    return block.sent[axis]["bytes"] if axis in block.sent else 0.0


def over_first(plans: Sequence[Measured]) -> list[Spread | None]:
    """Return the time of a step of each plan over that of the first, block by block; None where either has failed."""
    series = {str(number): plan.seconds for number, plan in enumerate(plans) if plan.failure is None}
    return [ratio(series, str(at), "0") if {str(at), "0"} <= series.keys() else None for at in range(len(plans))]


def as_json(plans: Sequence[Measured]) -> list[dict[str, Any]]:
    """Return one object for each plan. A failed plan has the reason, and the blocks that it completed."""
    rows = []
    for plan, against in zip(plans, over_first(plans), strict=True):
        row: dict[str, Any] = {"label": plan.label, "plan": plan.plan, "ranks": plan.ranks, "threads": plan.threads}
        row["failure"], row["block_step_seconds"] = plan.failure, plan.seconds
        if plan.failure is None:
            row |= {
                "step_seconds": asdict(Spread.of(plan.seconds)),
                "over_first": None if against is None else asdict(against),
                "tokens_per_step": plan.tokens,
                "tokens_per_second": plan.tokens_per_second,
                "mfu": plan.mfu,
                "sent_bytes_per_step": plan.sent,
                "peak_memory_bytes": plan.peak_memory,
            }
        rows.append(row)
    return rows


def print_bench(plans: Sequence[Measured], console: Console, steps: int, *, counted: str, on_cuda: bool) -> None:
    """Print a row for each plan, and the meaning of the columns.

    Args:
        steps: steps of a block.
        counted: the unit that the loss counts.
        on_cuda: memory is that of the device, else that of the process.
    """
    columns = ("step", "quartiles", "time / first", f"{counted}/s", "MFU", "sent/step", "peak memory")
    rows = [_cells(plan, against) for plan, against in zip(plans, [None, *over_first(plans)[1:]], strict=True)]
    print_rows(console, columns, rows)
    done = [plan for plan in plans if plan.failure is None]
    lines = [f"{plan.label}: failed: {plan.failure}" for plan in plans if plan.failure is not None]
    if done:
        memory = "tensors on the device" if on_cuda else "resident set of the process, torch included"
        lines += [
            "",
            f"step: median and quartiles over {len(done[0].blocks)} blocks of the mean of {steps} steps; "
            "time / first: median and quartiles of the ratios of blocks",
            "batches are read before the clock starts; sent: by the rank that sends most along the axis; "
            f"memory: {memory}, on the fullest rank",
        ]
        lines += [f"{plan.label}: {plan.plan}; threads per rank: {plan.threads}" for plan in done]
    print_lines(console, lines)


def _cells(plan: Measured, against: Spread | None) -> list[str]:
    if plan.failure is not None:
        return [plan.label]
    step = Spread.of(plan.seconds)
    return [
        plan.label,
        seconds_text(step.median),
        f"{seconds_text(step.low)} - {seconds_text(step.high)}",
        "-" if against is None else str(against),
        f"{plan.tokens_per_second:,.0f}",
        "-" if plan.mfu is None else f"{plan.mfu:.1%}",
        ", ".join(f"{axis} {byte_count(size)}" for axis, size in plan.sent.items()) or "-",
        byte_count(plan.peak_memory),
    ]
