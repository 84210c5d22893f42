"""Under which config a checkpoint is evaluated: that of its run, with all of its validation data. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from colossus.checkpoint.manifest import BYTES, TOKENIZER_FILE
from colossus.config import Config, ConfigError, load_config
from colossus.config.components import is_text
from colossus.config.loading import with_tokenizer
from colossus.config.section import Named
from colossus.inference.config import Source, recorded, recorded_precision
from colossus.registry import SCHEDULES

#: what evaluations look at
_EVALUATE_SECTIONS = ("model", "data", "parallel", "schedule", "train", "comm", "device")
#: keys of the section train that say how to train
_OF_TRAINING = ("activation_checkpoint", "steps", "schedule_steps", "eval_every", "eval_batches")


def evaluation_config(
    source: Source, overrides: Sequence[str] = (), config_file: str | None = None, *, nproc: int | None = None
) -> Config:
    """The config of a checkpoint's run, with all of its validation data, unless the overrides say otherwise.

    Args:
        config_file: takes the place of what the checkpoint records.
        nproc: number of processes. 1: in this process, without a plan; another one than the plan has derives
            ``parallel.data``. None is the plan of the run.

    Raises:
        ConfigError: for what is no config, a plan that does not fit, code that the checkpoint names.
    """
    keys = [text.partition("=")[0] for text in overrides]
    problems = [
        f"{text}: evaluate trains nothing, and takes the weights of {source.folder}; leave it out"
        for text, key in zip(overrides, keys, strict=True)
        if key.partition(".")[0] in ("optimizer", "lr_schedule", "checkpoint", "hooks", "name")
    ]
    if problems:
        raise ConfigError(problems)
    values = recorded(source, config_file, _EVALUATE_SECTIONS, without_data=bool({"data", "data.type"} & set(keys)))
    plan, train = dict(values.get("parallel") or {}), dict(values.get("train") or {})
    plan.pop("strategy", None)  # no replica tells another of a gradient
    if nproc is not None:
        plan = {} if nproc == 1 else {key: value for key, value in plan.items() if key != "data"}
    train.setdefault("precision", recorded_precision(source))
    schedule = values.get("schedule") or {}
    if (
        isinstance(schedule, Mapping) and schedule.get("type", "1f1b") not in SCHEDULES
    ):  # of a user's own: forwards come in one order
        schedule = {"microbatches": schedule.get("microbatches", 1)}
    kept = {key: value for key, value in train.items() if key not in _OF_TRAINING}
    config = load_config({**values, "parallel": plan, "train": kept, "schedule": schedule}, overrides, nproc)
    config._source = Path(config_file).name if config_file is not None else None
    if config.data is None:
        raise ConfigError(
            f"{source.folder} records no data, which was given to the run otherwise: give data: data.type=TextFolder "
            f"data.path=..., say, or --config FILE"
        )
    config = _with_its_tokenizer(config, source)
    most = config.train.eval_batches if {"train", "train.eval_batches"} & set(keys) else None
    train_section = config.train.model_copy(update={"eval_batches": most})
    return config.model_copy(update={"name": "evaluate", "train": train_section})


def training_data(config: Config) -> Config:
    """The config with its training data, from first to last, in the place of its validation data."""
    data = config.data
    if not isinstance(data, Named):
        is_maker = callable(data) and not hasattr(data, "__getitem__")
        return config.model_copy(update={"data": Named(type=data, validation={} if is_maker else data)})
    has_splits = isinstance(data.type, str) and "split" not in data.options
    validation = {"split": "train"} if has_splits else {}
    return config.model_copy(update={"data": Named(**{**data.spec(), "validation": validation})})


def _with_its_tokenizer(config: Config, source: Source) -> Config:
    """Text becomes ids by the tokenizer.json that the checkpoint holds, where nothing names another.

    Raises:
        ConfigError: for text that nothing says how to read: weights that no run of ours has trained.
    """
    data, tokenizer = config.data, source.manifest.tokenizer
    if tokenizer == TOKENIZER_FILE:
        return with_tokenizer(config, str(source.folder))
    is_untold = tokenizer is None and (source.is_foreign or source.manifest.is_weights_only)
    if is_untold and isinstance(data, Named) and is_text(data.type) and data.options.get("tokenizer") is None:
        raise ConfigError(
            f"{source.folder} has no {TOKENIZER_FILE}, so nothing says how text becomes the ids of its model: give "
            f"data.tokenizer=PATH of one, or data.tokenizer={BYTES}"
        )
    return config
