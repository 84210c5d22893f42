"""``colossus show --lr``: the learning rate of each step, and a batch that grows, in numbers and as a chart."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from colossus.arithmetic import counted
from colossus.chart import Line, Panel, in_encoding, save_charts, text_chart
from colossus.chart.panel import readable
from colossus.config import Config, ConfigError, model_options
from colossus.config.learning_rates import LearningRates
from colossus.config.plans import name_of

#: points of a line, and at most twice as many: a picture shows no more
_POINTS = 1000


def render_learning_rates(config: Config, width: int, picture: str | None = None) -> str:
    """Return the learning rates of a config's run, in numbers and as a chart. Steps count from 1, as in metrics.

    Args:
        config: the config.
        width: columns of the chart.
        picture: a file to draw the chart into as well.

    Raises:
        ConfigError: the picture cannot be drawn.
    """
    train, schedule, model = config.train, config.lr_schedule, model_options(config)
    rates, sizes = LearningRates(config), train.batch_sizes
    values = [rates.at(step) for step in range(train.steps)]
    samples, length = getattr(model, "samples", "samples"), getattr(model, "seq_len", 0)
    num_samples = sizes.before(train.steps)
    options = {"warmup_steps": schedule.warmup_steps, "min_ratio": schedule.min_ratio, **schedule.options}
    words = "".join(f", {key} {value}" for key, value in options.items() if value)
    top, tokens = max(values), f", {num_samples * length:,} tokens" if length else ""
    lines = [
        str(config.name),
        f"schedule       {name_of(schedule.type)}{words}",
        f"learning rate  {readable(values[0])} in step 1, at most {readable(top)} (step {values.index(top) + 1:,}), "
        f"{readable(values[-1])} in step {train.steps:,}",
    ]
    panels = [_panel("learning rate", "", train.steps, values.__getitem__)]
    if train.batch_ramp is not None:
        lines.append(f"batch          {sizes.at(0)} {samples}, {sizes.full} from step {sizes.full_from + 1:,} on")
        panels.append(_panel("batch", samples, train.steps, sizes.at))
    lines.append(f"in all         {counted(train.steps, 'step')}, {num_samples:,} {samples}{tokens}")
    if picture:
        try:
            save_charts(panels, Path(picture))
        except (ValueError, OSError) as error:
            raise ConfigError(f"--lr: {error}") from error
    charts = [
        in_encoding(text_chart(panel, width, height), sys.stdout.encoding)
        for panel, height in zip(panels, (16, 12), strict=False)
    ]
    return "\n\n".join(["\n".join(lines), *charts, *([f"drawn in {picture}"] if picture else [])])


def _panel(title: str, unit: str, steps: int, at: Callable[[int], float]) -> Panel:
    shown = sorted({*range(0, steps, max(1, steps // _POINTS)), steps - 1})
    line = Line("", [step + 1 for step in shown], [at(step) for step in shown])
    return Panel(title, [line], x_label="step", y_label=unit)
