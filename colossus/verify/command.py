"""``colossus verify``: launch twice, compare, report. No torch until the config is known to be right."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

from colossus.config import Config, ConfigError, load_config
from colossus.config.plans import describe_plan
from colossus.config.sizes import world_size
from colossus.context.grid import build_grid
from colossus.launch import command
from colossus.launch.inside import environment_kept, output_to
from colossus.launch.preflight import check_devices, check_model
from colossus.verify import configs

AGREE, FAILED, USAGE, DIFFERENT = 0, 1, 2, 3


def run(config_path: str, overrides: list[str], *, nproc: int | None = None, steps: int, tolerance: float) -> int:
    """Train the config's model for a few steps in one process and under its plan, and compare.

    The model's parameters, their gradients at every step and the outputs of its modules are compared, see `checks`.
    The steps are taken by the optimizer of the config, with its learning rates; see `ComparableWeights` for the
    weights that rounding alone would move. Model, gradients and optimizer state must fit into one process in float64.

    Args:
        nproc: processes of the plan; by default the product of its sizes.
        steps: optimizer steps of both runs.
        tolerance: largest relative difference that still agrees.

    Returns:
        0 agree, 3 differ, 1 failed at run time, 2 config or usage; 130, 143 and 129 after a stop signal.
    """
    try:
        if command.worker_variables(os.environ) is not None:
            raise ConfigError("verify starts its own processes: run it by itself, without torchrun or srun")
        config = load_config(config_path, overrides, nproc)
        _check_config(config)
    except ConfigError as error:
        print(f"colossus: {error}", file=sys.stderr)
        return USAGE
    folder, keep = Path(tempfile.mkdtemp(prefix="colossus-verify-")), False
    try:
        for is_reference in (True, False):
            file = configs.write(folder, config_path, overrides, nproc, steps, is_reference=is_reference)
            code = _launch(config, file, is_reference)
            if code:
                keep = code == FAILED  # what was printed names the failure records
                return code
        return _compare(config, folder, steps, tolerance)
    finally:
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)
        for path in folder.glob("*/*.pt"):
            path.unlink(missing_ok=True)


def _check_config(config: Config) -> None:
    for key, what in (("model", "model = dict(type=your_class)"), ("data", "data = dict(type=your_dataset)")):
        if getattr(config, key) is None:
            raise ConfigError(f"{key}: verify runs what the file says, and it has none: give it {what}", config.source)
    check_devices(config, world_size(config.parallel))
    check_model(config)


def _compare(config: Config, folder: Path, steps: int, tolerance: float) -> int:
    # torch is imported here
    from colossus.verify.checks import NotComparable, compare
    from colossus.verify.records import Records
    from colossus.verify.report import render

    grid = build_grid(config.parallel)
    plan = Records(folder / configs.NAMES[False], grid.world_size)
    reference = Records(folder / configs.NAMES[True], 1)
    try:
        verdict = compare(plan, reference, steps, tolerance)
    except NotComparable as error:
        print(f"colossus: nothing can be compared: {error}", file=sys.stderr)
        return FAILED
    print(render(verdict, config, plan, reference, grid, steps, tolerance))
    return AGREE if verdict.check is None else DIFFERENT


def _launch(config: Config, file: Path, is_reference: bool) -> int:
    """One of the two runs; its ranks' output goes to a file."""
    processes = 1 if is_reference else world_size(config.parallel)
    what = "one process" if is_reference else describe_plan(config)
    print(
        f"{config.name}: {what}, float64, {processes} process{'' if processes == 1 else 'es'} ... ", end="", flush=True
    )
    since = time.monotonic()
    output = file.with_suffix(".txt")
    with output_to(output), environment_kept():
        code = command.run(str(file), [], nproc=processes, run_dir=str(file.with_suffix("")))
    ended = "done in" if code == 0 else "failed after" if code in (FAILED, USAGE) else "stopped after"
    print(f"{ended} {time.monotonic() - since:.0f} s", flush=True)
    if code == FAILED:
        run_name = "the run in one process" if is_reference else "the run under the plan"
        print(f"colossus: {run_name} failed, so nothing was compared; its ranks' output: {output}", file=sys.stderr)
    return code
