"""``colossus verify``: launch twice, compare, report. No torch in this process."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from colossus.config import Config, ConfigError, load_config
from colossus.config.plans import describe_plan, model_options, world_size
from colossus.config.training import PRECISIONS, PrecisionSection
from colossus.context.grid import build_grid
from colossus.launch import command
from colossus.launch.checks import check_devices, check_model
from colossus.verify import verify_report

AGREE, FAILED, USAGE, DIFFERENT = 0, 1, 2, 3
#: the largest relative difference in float64 that agrees
TOLERANCE = 1e-9


def run(
    config_path: str, overrides: list[str], *, nproc: int | None = None, steps: int = 3, tolerance: float | None = None
) -> int:
    """Train the config's model for a few steps in one process and under its plan, and compare.

    The comparison covers the model's parameters, their gradients at every step and the outputs of its modules. The
    config's optimizer takes the steps, with its learning rates. Model, gradients and optimizer state must fit into one
    process in float64.

    Args:
        nproc: processes of the plan; by default the product of its sizes.
        steps: optimizer steps of both runs.
        tolerance: largest relative difference that still agrees; by default `TOLERANCE`.

    Returns:
        0 agree, 3 differ, 1 failed at run time, 2 config or usage; 130, 143 and 129 after a stop signal.
    """
    tolerance = TOLERANCE if tolerance is None else tolerance
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
            file = write_config(
                folder, config_path, overrides, nproc, steps, tolerance=None if is_reference else tolerance
            )
            code = _launch(config, file, is_reference)
            if code:
                keep = code == FAILED  # the printed message names the run folder
                return code
        grid = build_grid(config.parallel)
        verdict = verify_report.read(folder, grid.world_size, steps, tolerance)
        print(verify_report.render(verdict, config, grid, steps, tolerance))
        return DIFFERENT if verdict.differing else AGREE
    finally:
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)
        for path in folder.glob("*.pt"):
            path.unlink(missing_ok=True)


def _check_config(config: Config) -> None:
    for key, what in (("model", "model = dict(type=your_class)"), ("data", "data = dict(type=your_dataset)")):
        if getattr(config, key) is None:
            raise ConfigError(f"{key}: the file sets none, and verify needs one: set {what}", config.source)
    if config.train.tokens_per_microbatch is not None:
        raise ConfigError(
            "train.tokens_per_microbatch: verify compares modules microbatch by microbatch, and a budget gives "
            "each plan other ones: add train.tokens_per_microbatch=None, with samples of one length",
            config.source,
        )
    check_devices(config, world_size(config.parallel))
    check_model(config)


def _launch(config: Config, file: Path, is_reference: bool) -> int:
    """Launch one of the two runs, with its ranks' output in a file, and return the exit code."""
    processes = 1 if is_reference else world_size(config.parallel)
    what = "one process" if is_reference else describe_plan(config)
    number = f"{processes} process{'' if processes == 1 else 'es'}"
    print(f"{config.name}: {what}, float64, {number} ... ", end="", flush=True)
    since = time.monotonic()
    output = file.with_suffix(".txt")
    with command.contained(output):
        code = command.run(str(file), [], nproc=processes, run_dir=str(file.with_suffix("")))
    ended = "done in" if code == 0 else "failed after" if code in (FAILED, USAGE) else "stopped after"
    print(f"{ended} {time.monotonic() - since:.0f} s", flush=True)
    if code == FAILED:
        run_name = "the run in one process" if is_reference else "the run under the plan"
        print(f"colossus: {run_name} failed, so nothing was compared; its ranks' output: {output}", file=sys.stderr)
    return code


# -- the configs of both runs -----------------------------------------------------------------------------


def write_config(
    folder: Path, path: str, overrides: Sequence[str], nproc: int | None, steps: int, *, tolerance: float | None
) -> Path:
    """Write a config file that loads the user's and applies the changes of `sections`. Return its path.

    Args:
        folder: the folder of the comparison.
        tolerance: the tolerance of the comparison; None for the run in one process.
    """
    file = folder / f"{'reference' if tolerance is None else 'plan'}.py"
    arguments = (str(Path(path).resolve()), list(overrides), nproc, steps, str(folder), tolerance)
    file.write_text(
        f"from colossus.verify.run_verify import sections as _sections\n\n"
        f"globals().update(_sections({', '.join(map(repr, arguments))}))\n"
    )
    return file


def sections(
    path: str, overrides: list[str], nproc: int | None, steps: int, folder: str, tolerance: float | None
) -> dict[str, Any]:
    """Return the sections of the user's config for one of the two runs.

    Both runs are in float64, evaluate nothing, and have a hook of this room in place of the user's. The learning rates
    are those of the user's schedule. In one process the modules of an unchanged model are torch's own, with their hooks
    and the attributes of their parameters, so that anything that the conversion loses shows as a difference.

    Raises:
        ConfigError: see ``load_config``.
    """
    config = load_config(path, overrides, nproc)
    out: dict[str, Any] = {key: getattr(config, key) for key in Config.model_fields}
    train = {"precision": PrecisionSection(**PRECISIONS["fp64"]), "steps": steps, "eval_every": 0, "log_every": steps}
    if tolerance is None:
        out["parallel"], out["schedule"] = {"data": 1}, {"microbatches": config.schedule.microbatches}
        if config.model is not None and model_options(config) is None:
            out["model"] = {"type": make_reference, "spec": config.model.spec()}
    else:  # values that are not finite are compared, too
        train |= {"on_nonfinite": "skip", "max_skips": steps}
    out["train"] = config.train.model_copy(update=train)
    out["hooks"] = [{"type": make_hook, "folder": folder, "tolerance": tolerance}]
    return out


def make_reference(spec: dict[str, Any]) -> Any:
    """Return the model of a config for the run in one process."""
    from colossus.convert.parallelize import as_reference
    from colossus.registry import MODELS

    with as_reference():
        return MODELS.build(spec)


def make_hook(folder: str, tolerance: float | None) -> Any:
    # imported late: a config is checked without torch
    from colossus.verify.hooks import Comparison, Reference

    return Reference(folder) if tolerance is None else Comparison(folder, tolerance)
