"""``colossus bench``: time the train step under several plans, whose processes all run and take turns."""

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
from colossus.compare.interleaved import alternate, environment, unique_labels
from colossus.compare.variants import check_plan, make_all
from colossus.config import Config, ConfigError, load_config, model_options
from colossus.config.overrides import plan_overrides
from colossus.config.plans import describe_plan, world_size
from colossus.launch import command
from colossus.launch.checks import check_required, describe_device, is_on_cuda
from colossus.launch.servers import num_servers
from colossus.progress import progress

AS_IN_FILE = "as in the file"
#: evaluations and checkpoints would come between steps and make replicas wait for each other
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
        plans: see `plan_overrides`; without one, or with an empty text, the plan of the file. The same plan twice shows
            the noise.
        overrides: overrides for all plans.
        warmup: steps before the first block.
        steps: steps of a block.
        blocks: blocks of each plan.
        json: a file for all times; ``-`` prints them instead of the table.
        dry_run: check everything, print the plans that would be timed, start nothing.

    Returns:
        0 done, 1 a plan has failed, 130 stopped by Ctrl-C, with a table of the blocks that all plans have completed.

    Raises:
        ConfigError: for any problem of any plan, before a process is started.
    """
    if command.worker_variables(os.environ) is not None:
        raise ConfigError("bench starts its own processes: run it by itself, without torchrun or srun")
    if json is not None and not Path(json).absolute().parent.is_dir():
        raise ConfigError(f"--json {json}: there is no folder {Path(json).parent}")
    overrides_of = {
        label if text else AS_IN_FILE + label: (*overrides, *plan_overrides(text), *_OWN_OVERRIDES)
        for label, text in unique_labels([" ".join(plan.split()) for plan in plans or [""]]).items()
    }
    configs = dict(
        zip(overrides_of, make_all(overrides_of, lambda label: _load(file, overrides_of[label])), strict=True)
    )
    # torch is imported here
    from colossus.compare.timed_plan import TimedPlan, one_thread

    one_thread()
    make_all(configs, lambda label: check_plan(configs[label]))
    if dry_run:
        print("nothing was started (--dry-run)")
        for label, config in configs.items():
            print(f"{label}: {describe_plan(config)}, {counted(world_size(config.parallel), 'process', 'es')}")
        return 0
    timed = [TimedPlan(label, file, overrides_of[label], config) for label, config in configs.items()]
    measured = [plan.measured for plan in timed]
    try:
        with ExitStack() as stack:
            for plan in timed:
                progress(f"{plan.measured.label}: starting, warm-up")
                plan.start(stack, warmup)
            alternate({plan.measured.label: partial(plan.block, steps) for plan in timed}, blocks)
    except KeyboardInterrupt:
        progress("")
        blocks = min((len(plan.blocks) for plan in measured if plan.failure is None), default=0)
        if not blocks:
            raise
        for result in measured:
            del result.blocks[blocks:]
        print(f"stopped by Ctrl-C after {counted(blocks, 'block')} of each plan", file=sys.stderr)
        code = 128 + signal.SIGINT
    else:
        code = int(any(plan.failure is not None for plan in measured))
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
    check_required(config)
    if num_servers(config, 1):
        raise ConfigError(
            f"parallel.strategy = {config.parallel.strategy.type!r} needs parameter servers, which bench does not "
            f"start: run it with `colossus compare`",
            config.source,
        )
    return config
