"""``colossus bench``: the train step under several plans, whose processes are all there and take turns."""

from __future__ import annotations

import json as json_module
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from rich.console import Console

from colossus.arithmetic import counted
from colossus.compare.bench_table import as_json, print_bench
from colossus.compare.interleaved import alternate, environment, progress, unique
from colossus.compare.variants import check_plan, of_each
from colossus.config import Config, ConfigError, load_config, model_options
from colossus.config.overrides import plan_overrides
from colossus.config.plans import describe_plan, describe_processes, world_size
from colossus.launch import command
from colossus.launch.checks import check_given, describe_device, is_on_cuda
from colossus.launch.servers import num_servers

AS_IN_FILE = "as in the file"
#: no evaluation and no checkpoint comes between steps, and none makes replicas wait for each other
_OWN_OVERRIDES = ("checkpoint.every=0", "train.eval_every=0", "train.batch_ramp=None", "train.profile=None")


def run(
    file: str,
    plans: Sequence[str] = (),
    *,
    overrides: Sequence[str] = (),
    warmup: int = 3,
    steps: int = 5,
    blocks: int = 6,
    json: str | None = None,
    dry_run: bool = False,
) -> int:
    """Time the train step of a config file under each of the plans, side by side (`alternate`).

    Args:
        plans: see `plan_overrides`; none, or an empty text: that of the file. The same twice shows the noise.
        overrides: for all plans.
        warmup: steps before the first block.
        steps: of a block.
        blocks: of each plan.
        json: a file for all times; ``-`` prints them in the place of the table.
        dry_run: check everything, say what would be timed, start nothing.

    Returns:
        0 done, 1 a plan has failed, 130 stopped by Ctrl-C, with a table of the blocks that all plans have come to.

    Raises:
        ConfigError: for what is wrong with any of the plans, before a process is started.
    """
    if command.worker_variables(os.environ) is not None:
        raise ConfigError("bench starts its own processes: run it by itself, without torchrun or srun")
    if json is not None and not Path(json).absolute().parent.is_dir():
        raise ConfigError(f"--json {json}: there is no folder {Path(json).parent}")
    given = {
        label if text else AS_IN_FILE + label: (*overrides, *plan_overrides(text), *_OWN_OVERRIDES)
        for label, text in unique([" ".join(plan.split()) for plan in plans or [""]]).items()
    }
    configs = dict(zip(given, of_each(given, lambda label: _load(file, given[label])), strict=True))
    # torch is imported here
    from colossus.compare.timed_plan import TimedPlan, one_thread

    one_thread()
    of_each(configs, lambda label: check_plan(configs[label]))
    if dry_run:
        print("nothing was started (--dry-run)")
        for label, config in configs.items():
            print(f"{label}: {describe_plan(config)}, {describe_processes(world_size(config.parallel))}")
        return 0
    timed = [TimedPlan(label, file, given[label], config) for label, config in configs.items()]
    measured = [plan.measured for plan in timed]
    try:
        with ExitStack() as stack:
            for plan in timed:
                progress(f"{plan.measured.label}: starting, warm-up")
                plan.start(stack, warmup)
            alternate({plan.measured.label: partial(plan.block, steps) for plan in timed}, blocks)
    except KeyboardInterrupt:
        progress("")
        blocks = min((len(each.blocks) for each in measured if each.failure is None), default=0)
        if not blocks:
            raise
        for each in measured:
            del each.blocks[blocks:]
        print(f"stopped by Ctrl-C after {counted(blocks, 'block')} of each plan", file=sys.stderr)
        code = 128 + signal.SIGINT
    else:
        code = int(any(each.failure is not None for each in measured))
    first = next(iter(configs.values()))
    if json is not None:
        about = {**environment(), "device": describe_device(first, world_size(first.parallel))}
        counts = {"file": file, "overrides": [*overrides], "warmup": warmup, "steps": steps, "blocks": blocks}
        text = json_module.dumps({"environment": about, **counts, "plans": as_json(measured)}, indent=1)
        if json == "-":
            print(text)
        else:
            Path(json).write_text(text + "\n")
    if json != "-":
        unit = getattr(model_options(first), "counted", "tokens")
        print_bench(measured, Console(), steps, counted=unit, on_cuda=is_on_cuda(first))
    return code


def _load(file: str, overrides: Sequence[str]) -> Config:
    config = load_config(file, overrides)
    check_given(config)
    if num_servers(config, 1):
        raise ConfigError(
            f"parallel.strategy = {config.parallel.strategy.type!r} needs parameter servers, which bench does not "
            f"start: `colossus compare` runs it",
            config.source,
        )
    return config
