"""The head of a plan: the lines that `launch --dry-run`, `show` and others print of a resolved config. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from colossus.arithmetic import counted
from colossus.config.plans import (
    describe_plan,
    model_options,
    name_of,
    strategy_options,
    world_size,
)
from colossus.config.schema import Config


def plan_head(config: Config) -> dict[str, str]:
    """Return the texts of a plan by their titles: plan, rank order, batch, and ramp, strategy, recomputed if it has."""
    parallel, train, microbatches = config.parallel, config.train, config.schedule.microbatches
    data, batch, options = parallel.data or 1, train.global_batch_size, strategy_options(config)
    samples = getattr(model_options(config), "samples", "samples")
    batch_text = f"{batch} {samples} = data {data} x microbatches {microbatches} x {batch // (data * microbatches)}"
    if train.tokens_per_microbatch is not None:
        most = train.tokens_per_microbatch
        batch_text = f"{batch} {samples}, in microbatches of at most {most:,} tokens on each data rank"
    promise = "" if options is None else options.describe(data)
    head = {
        "plan": f"{describe_plan(config)}: {counted(world_size(parallel), 'process', 'es')}",
        "rank order": f"{', '.join(parallel.rank_order)} (outermost first)",
        "batch": batch_text,
        "ramp": "" if train.batch_ramp is None else str(train.batch_ramp),
        "strategy": promise and f"{name_of(parallel.strategy.type)} ({promise})",
        "recomputed": "" if train.activation_checkpoint.type == "none" else str(train.activation_checkpoint),
    }
    return {title: text for title, text in head.items() if text}


def as_lines(rows: Mapping[str, str] | Iterable[tuple[str, str]]) -> str:
    """Return a line for each title with its text."""
    pairs = rows.items() if isinstance(rows, Mapping) else rows
    return "\n".join(f"{title:<11} {text}" for title, text in pairs)
