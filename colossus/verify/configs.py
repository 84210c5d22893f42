"""The two configs that are launched in place of the user's: one with their plan, one in one process."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from colossus.config import Config, load_config
from colossus.config.training import PRECISIONS, PrecisionSection

NAMES = {True: "reference", False: "plan"}
"""Whether the run is the reference -> name of its config file and run folder."""


def write(
    folder: Path, path: str, overrides: Sequence[str], nproc: int | None, steps: int, *, is_reference: bool
) -> Path:
    """Write a config file that loads the user's and changes what `sections` changes. Returns its path.

    Args:
        folder: of the comparison; the records go to the folder of the same name in it.
        is_reference: for the run in one process.
    """
    file = folder / f"{NAMES[is_reference]}.py"
    records = folder / NAMES[is_reference]
    values = (str(Path(path).resolve()), list(overrides), nproc, steps, str(records))
    arguments = ", ".join(map(repr, values))
    file.write_text(
        f"from colossus.verify.configs import sections as _sections\n\n"
        f"globals().update(_sections({arguments}, is_reference={is_reference}))\n"
    )
    return file


def sections(
    path: str, overrides: list[str], nproc: int | None, steps: int, records: str, *, is_reference: bool
) -> dict[str, Any]:
    """The sections of the user's config for one of the two runs.

    Both are in float64, evaluate nothing, and carry the recorder in place of the user's hooks. The learning rates are
    those of the user's schedule.

    Raises:
        ConfigError: as ``load_config``.
    """
    config = load_config(path, overrides, nproc)
    out: dict[str, Any] = {key: getattr(config, key) for key in Config.model_fields}
    out["train"] = config.train.model_copy(
        update={
            "precision": PrecisionSection(**PRECISIONS["fp64"]),
            "steps": steps,
            "eval_every": 0,
            "log_every": steps,
            "on_nonfinite": "skip",  # what is not a number is compared, too
            "max_skips": steps,
        }
    )
    out["hooks"] = [{"type": make_recorder, "folder": records, "by_token": config.parallel.sequence.size > 1}]
    if is_reference:
        out["parallel"], out["schedule"] = {"data": 1}, {}
    return out


def make_recorder(folder: str, by_token: bool) -> Any:
    # imported late: a config is checked without torch
    from colossus.verify.capture import Recorder

    return Recorder(folder, by_token)


make_recorder.compares_values = True  # type: ignore[attr-defined]  # and says where values differ from one process
