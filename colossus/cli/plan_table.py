"""The output of ``colossus plan``, as a table and as JSON: the question, the best plans, their costs. No torch."""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from colossus.arithmetic import aligned, byte_count, counted
from colossus.cli.memory_table import kind_table, memory_as_json
from colossus.compare.printed_rows import seconds_text
from colossus.config import Config, ConfigError, model_options
from colossus.config.plans import describe_plan, name_of
from colossus.hardware.hardware import Hardware
from colossus.planner.fixed_keys import FixedKeys
from colossus.planner.plan_estimate import PlanEstimate, SearchResult

#: the fewest columns for a plan in words
_NARROWEST = 40


@dataclass(frozen=True)
class Question:
    """A question that ``colossus plan`` answers.

    Attributes:
        file, overrides: arguments of the command line.
        config: their resolved config.
        hardware: speed of devices and links.
        devices: ranks of a plan.
        hosts: hosts that share them evenly.
        memory: bytes of a device that a plan may use.
        keep: keys that every plan has, see `colossus.planner.fixed_keys.FixedKeys`.
    """

    file: str
    overrides: tuple[str, ...]
    config: Config
    hardware: Hardware
    devices: int
    hosts: int
    memory: float
    keep: Mapping[str, Any] = field(default_factory=dict)

    @property
    def counted(self) -> str:
        """Return the unit that the loss counts: ``tokens``, ``samples``, .."""
        return str(getattr(model_options(self.config), "counted", "tokens"))


def render_table(question: Question, result: SearchResult, width: int) -> str:
    """Return the whole output, ``width`` columns wide."""
    best = result.plans[0]
    sections = [
        head(question, result),
        plan_rows(question, [str(rank) for rank in range(1, len(result.plans) + 1)], result.plans, width),
        *usual_rows(question, result, width),
        memory_rows("the best", question, best),
        part_rows(best),
    ]
    if best.axes:
        sections.append(axis_rows(best))
    return "\n\n".join([*sections, launch_lines(question, best, width)])


def head(question: Question, result: SearchResult) -> str:
    """Return lines with the question, and the number of plans that the search tried."""
    config, hardware = question.config, question.hardware
    model = "none" if config.model is None else name_of(config.model.type)
    hosts, network = counted(question.hosts, "host"), hardware.network
    between = ""
    if question.hosts > 1 and network is not None:
        between = f"; between hosts {seconds_text(network.latency)} and {network.bandwidth / 1e9:.3g} GB/s per device"
    batch, unit = config.train.global_batch_size, getattr(model_options(config), "samples", "samples")
    tokens = f", {result.plans[0].tokens:,.0f} {question.counted} a step" if result.plans else ""
    lines = [
        f"model       {model}, {config.train.precision.name}",
        f"batch       {batch:,} {unit}{tokens}",
        f"devices     {question.devices:,} on {hosts}, {byte_count(question.memory)} each",
        f"hardware    {hardware.name}{between}",
        f"tried       {counted(result.tried, 'plan')} in {result.seconds:.1f} s",
    ]
    return "\n".join([str(config.name), *lines])


def plan_words(config: Config) -> str:
    """Return a plan in words: those of `describe_plan`, and the other options that the search chooses."""
    tensor, kind = config.parallel.tensor, config.train.activation_checkpoint
    words = [describe_plan(config), *(f"{name} {value}" for name, value in config.schedule.options.items())]
    if tensor.shape is not None:
        words.append(f"tensor shape {'x'.join(map(str, tensor.shape))}")
    if tensor.weights != "matmul":
        words.append(f"weights gathered once per {tensor.weights}")
    if tensor.gathered == "keep":
        words.append("gathered inputs kept")
    if config.parallel.sequence.ulysses is not None:
        words.append(f"ulysses {config.parallel.sequence.ulysses}")
    if kind.type != "none":
        words.append(f"{kind.type} checkpointing{f' (every {kind.every})' if kind.every > 1 else ''}")
    return ", ".join(words)


def exposed_share(plan: PlanEstimate) -> float:
    """Return the fraction of a step in which the busiest rank waits for collectives."""
    return sum(seconds for part, seconds in plan.parts.items() if part.startswith("over ")) / plan.seconds


def usual_rows(question: Question, result: SearchResult, width: int) -> list[str]:
    """Return the table of the usual plans, if there are any: those that do not fit show how much they need."""
    if not result.usual:
        return []
    names = [
        name if plan.memory.fullest.total <= question.memory else f"{name}, does not fit"
        for name, plan in result.usual.items()
    ]
    return [f"usual plans\n{plan_rows(question, names, [*result.usual.values()], width)}"]


def plan_rows(question: Question, names: Sequence[str], plans: Sequence[PlanEstimate], width: int) -> str:
    """Return a table with a row for each plan; words that need more columns continue below."""
    rows = [["", "step", f"{question.counted}/s", "MFU", "memory", "bubble", "exposed"]]
    for name, plan in zip(names, plans, strict=True):
        mfu = "-" if plan.mfu is None else f"{100 * plan.mfu:.1f} %"
        cells = [name, seconds_text(plan.seconds), f"{plan.tokens_per_second:,.0f}", mfu]
        cells += [byte_count(plan.memory.fullest.total), *(_percent(x) for x in (plan.bubble, exposed_share(plan)))]
        rows.append(cells)
    numbers = aligned(rows).splitlines()
    margin = max(map(len, numbers)) + 2
    lines = [f"{numbers[0]:<{margin}}plan"]
    for row, plan in zip(numbers[1:], plans, strict=True):
        words = textwrap.wrap(plan_words(plan.config), max(_NARROWEST, width - margin), break_on_hyphens=False)
        lines += [f"{cells:<{margin}}{line}" for cells, line in zip([row, *[""] * len(words)], words, strict=False)]
    return "\n".join(lines)


def memory_rows(title: str, question: Question, plan: PlanEstimate) -> str:
    """Return a table of the memory of a plan's fullest rank by kind."""
    fullest = plan.memory.fullest
    head = f"{byte_count(fullest.total)} of {byte_count(question.memory)} on {plan.memory.fullest_rank}"
    return f"{title:<11} {head}\n{textwrap.indent(kind_table(fullest), '  ')}"


def part_rows(plan: PlanEstimate) -> str:
    """Return a table of the parts of a step, for the rank that is busy longest."""
    rows = [(part, seconds_text(taken), _percent(taken / plan.seconds)) for part, taken in plan.parts.items() if taken]
    table = aligned([*rows, ("total", seconds_text(plan.seconds), "")], left_columns=(0,))
    return f"a step      on the rank that is busy longest\n{textwrap.indent(table, '  ')}"


def axis_rows(plan: PlanEstimate) -> str:
    """Return a table of each axis: bytes that a rank sends in a step, their seconds, and the exposed seconds."""
    rows = [("axis", "sent", "takes", "exposed")]
    rows += [
        (axis, byte_count(cost.bytes), seconds_text(cost.seconds), seconds_text(cost.exposed))
        for axis, cost in plan.axes.items()
    ]
    return f"sent        by a rank in a step\n{textwrap.indent(aligned(rows, left_columns=(0,)), '  ')}"


def launch_lines(question: Question, plan: PlanEstimate, width: int) -> str:
    """Return the command that runs a plan, quoted for a shell and broken into lines."""
    own = {override.partition("=")[0] for override in plan.overrides}
    others = [override for override in question.overrides if override.partition("=")[0] not in own]
    words = ["colossus", "launch", question.file, *others, *plan.overrides]
    if question.hosts > 1:
        words += ["--nnodes", str(question.hosts), "--rdzv-endpoint", "HOST:PORT"]
    lines = [""]
    for word in map(shlex.quote, words):
        if len(lines[-1]) + len(word) > width - 5:
            lines.append("  ")
        lines[-1] += f" {word}"
    return f"run it{' on each host' * (question.hosts > 1)}\n " + " \\\n ".join(lines)


def nothing_fits(question: Question, result: SearchResult, width: int) -> ConfigError:
    """Return the error of a search in which no plan fits; it shows the memory of the plan that comes nearest."""
    nearest = result.nearest
    assert nearest is not None
    words = textwrap.fill(plan_words(nearest.config), width, initial_indent="    ", subsequent_indent="    ")
    return ConfigError(
        f"{result.nothing_fits(question.devices, question.memory)}:\n"
        f"{words}\n{textwrap.indent(kind_table(nearest.memory.fullest), '    ')}\n"
        f"  {_ways_out(question, nearest)}",
        question.config.source,
    )


def _ways_out(question: Question, nearest: PlanEstimate) -> str:
    """Say in which order to change what the search may not."""
    ways = []
    if question.keep:
        names = sorted(FixedKeys.of(question.config, question.keep).keys)
        ways.append(f"leave open what is kept ({', '.join(names)})")
    zero = nearest.config.parallel.zero
    if zero.stage and not zero.offload:
        ways.append("store the optimizer on the host (parallel.zero.offload=True)")
    return "in this order: " + "; ".join([*ways, "use more --devices, devices of more --memory, or a smaller model"])


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


# -- --json ------------------------------------------------------------------------------------------------------


def as_json(question: Question, result: SearchResult, explained: int | None = None) -> dict[str, Any]:
    """Return the question and every plan as an object for JSON.

    Args:
        question: the question.
        result: the plans.
        explained: index of the plan that comes with its timeline.
    """
    hardware = question.hardware
    plans = [_plan_as_json(plan) for plan in result.plans]
    if explained is not None:
        plans[explained]["timeline"] = [
            [{**span.action._asdict(), "start": span.start, "end": span.end} for span in own]
            for own in result.plans[explained].spans
        ]
    return {
        "file": question.file,
        "overrides": question.overrides,
        "keep": question.keep,
        "devices": question.devices,
        "hosts": question.hosts,
        "memory": question.memory,
        "hardware": {
            "name": hardware.name,
            "is_measured": hardware.is_measured,
            "network": None if hardware.network is None else asdict(hardware.network),
        },
        "tried": result.tried,
        "search_seconds": result.seconds,
        "plans": plans,
        "usual": {name: _plan_as_json(plan) for name, plan in result.usual.items()},
    }


def _plan_as_json(plan: PlanEstimate) -> dict[str, Any]:
    return {
        "plan": plan_words(plan.config),
        "overrides": plan.overrides,
        "step_seconds": plan.seconds,
        "tokens_per_step": plan.tokens,
        "tokens_per_second": plan.tokens_per_second,
        "flops": plan.flops,
        "mfu": plan.mfu,
        "bubble": plan.bubble,
        "exposed": exposed_share(plan),
        "parts": dict(plan.parts),
        "axes": {axis: asdict(cost) for axis, cost in plan.axes.items()},
        "memory": memory_as_json(plan.memory),
    }
