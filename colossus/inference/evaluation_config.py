"""The config under which a checkpoint is evaluated: that of its run, without what only trains. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from colossus.checkpoint.companions import LABELS, TOKEN_IDS
from colossus.checkpoint.manifest import BYTES, TOKENIZER_FILE
from colossus.config import Config, ConfigError, load_config
from colossus.config.loading import read_file
from colossus.config.model_source import with_tokenizer
from colossus.config.overrides import apply_overrides
from colossus.config.ranges import is_text
from colossus.config.schema import READING_OPTIONS
from colossus.config.section import Named
from colossus.inference.plan import recorded_precision
from colossus.inference.source import Source
from colossus.registry import DATASETS, MODELS, SCHEDULES, STRATEGIES

#: sections that say how to train, and that no evaluation looks at
_OF_TRAINING = ("optimizer", "lr_schedule", "checkpoint", "hooks", "name")
_GIVE = "give --config FILE, the config file that it was trained with"


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
    problems = [
        f"{text}: evaluate trains nothing, and takes the weights of {source.folder}; leave it out"
        for text in overrides
        if text.partition("=")[0].partition(".")[0] in _OF_TRAINING
    ]
    if problems:
        raise ConfigError(problems)
    values = dict(read_file(Path(config_file)) if config_file is not None else source.manifest.config)
    for section in _OF_TRAINING:
        values.pop(section, None)
    values["parallel"] = _plan(values.get("parallel"), overrides, nproc)
    values["train"] = _train(values.get("train"), source)
    values["schedule"] = _schedule(values.get("schedule"))
    if any(text.startswith(("data=", "data.type=")) for text in overrides):
        values["data"] = {}  # the options that are recorded are of other data
    if config_file is None:
        _require_no_code(source, values)
        for key in (TOKEN_IDS, LABELS):
            values.pop(key, None)
    config = load_config(values, overrides, nproc)
    config._source = Path(config_file).name if config_file is not None else None
    for key, what in (("model", "a model"), ("data", "data: data.type=TextFolder data.path=..., say, or")):
        if getattr(config, key) is None:
            raise ConfigError(f"{source.folder} records no {key}, which was given to the run otherwise: {_give(what)}")
    config = _with_its_tokenizer(config, source, overrides, config_file)
    most = config.train.eval_batches if _is_given("train.eval_batches", overrides) else None
    train = config.train.model_copy(update={"eval_batches": most})
    return config.model_copy(update={"name": "evaluate", "train": train})


def _with_its_tokenizer(config: Config, source: Source, overrides: Sequence[str], config_file: str | None) -> Config:
    """Text becomes ids by the tokenizer.json that the checkpoint holds, unless an override or the config file names
    another: the file that the run was given may be gone, and other data would be read as bytes.

    Raises:
        ConfigError: for text that nothing says how to read: weights that no run of ours has trained.
    """
    data = config.data
    if not isinstance(data, Named):
        return config
    if source.tokenizer == TOKENIZER_FILE:
        spec = data.spec()
        if config_file is None:
            spec = _without_files(spec, apply_overrides({}, overrides).get("data"), data.type)
        return with_tokenizer(config.model_copy(update={"data": Named(**spec)}), str(source.folder))
    is_untold = source.tokenizer is None and (source.is_foreign or source.manifest.is_weights_only)
    if is_untold and is_text(data.type) and data.options.get("tokenizer") is None:
        raise ConfigError(
            f"{source.folder} has no {TOKENIZER_FILE}, so nothing says how text becomes the ids of its model: give "
            f"data.tokenizer=PATH of one, or data.tokenizer={BYTES}"
        )
    return config


def _without_files(data: Mapping[str, Any], given: Any, kind: Any) -> dict[str, Any]:
    """Data without the tokenizer files by which it reads text, but for those that overrides name."""
    given, out = given if isinstance(given, Mapping) else {}, dict(data)
    if is_text(kind) and "tokenizer" not in given and out.get("tokenizer") != BYTES:
        out.pop("tokenizer", None)
    validation = data.get("validation")
    if isinstance(validation, Mapping):
        out["validation"] = _without_files(validation, given.get("validation"), validation.get("type", kind))
    return out


def _is_given(key: str, overrides: Sequence[str]) -> bool:
    section = key.partition(".")[0]
    return any(text.startswith((f"{key}=", f"{section}=")) for text in overrides)


def _give(what: str) -> str:
    return f"give {what} --config FILE" if what.startswith("data") else f"give --config FILE, with {what}"


def training_data(config: Config) -> Config:
    """The config with its training data, from first to last, in the place of its validation data."""
    data = config.data
    spec = data.spec() if isinstance(data, Named) else {"type": data}
    is_made = isinstance(data, Named)
    same: Any = {} if is_made or (callable(data) and not hasattr(data, "__getitem__")) else data
    validation = {"split": "train"} if is_made and isinstance(data.type, str) and "split" not in data.options else same
    return config.model_copy(update={"data": Named(**{**spec, "validation": validation})})


def _plan(recorded: Any, overrides: Sequence[str], nproc: int | None) -> dict[str, Any]:
    """The plan of the run; what a strategy alone needs is left out, as no data rank tells another of a gradient."""
    if nproc == 1:
        return {}
    plan = dict(recorded) if isinstance(recorded, Mapping) else {}
    strategy = plan.get("strategy")
    kind = strategy.get("type") if isinstance(strategy, Mapping) else None
    zero = plan.get("zero")
    has_zero = zero.get("stage") if isinstance(zero, Mapping) else zero
    is_known = isinstance(kind, str) and kind in STRATEGIES
    if has_zero or not is_known or any(text.startswith("parallel.zero") for text in overrides):
        plan.pop("strategy", None)
    if nproc is not None:
        plan.pop("data", None)
    return plan


def _train(recorded: Any, source: Source) -> dict[str, Any]:
    train = dict(recorded) if isinstance(recorded, Mapping) else {"precision": recorded_precision(source)}
    # recomputation is of backward; steps and their numbers are nobody's here
    for key in ("activation_checkpoint", "steps", "schedule_steps", "eval_every", "eval_batches"):
        train.pop(key, None)
    return train


def _schedule(recorded: Any) -> Any:
    """A schedule of a user's own orders backwards; forwards come in one order."""
    kind = recorded.get("type", "1f1b") if isinstance(recorded, Mapping) else "1f1b"
    if isinstance(recorded, Mapping) and not (isinstance(kind, str) and kind in SCHEDULES):
        return {"microbatches": recorded.get("microbatches", 1)}
    return recorded if recorded is not None else {}


def _require_no_code(source: Source, values: Mapping[str, Any]) -> None:
    """That model and data are those of colossus, by their names.

    Raises:
        ConfigError: where the manifest has the name of a class or an object of a user instead.
    """
    problems = []
    for key, registry, instead in (
        ("model", MODELS, ""),
        ("data", DATASETS, ", or other data: data.type=TextFolder data.path=..."),
    ):
        unknown = [each for each in _named(values.get(key)) if each not in registry]
        if unknown:
            problems.append(
                f"{source.folder}: its {key} is {unknown[0]}, none of colossus ({', '.join(registry.names())}), and "
                f"code is never imported because a checkpoint names it: {_GIVE}{instead}"
            )
    if problems:
        raise ConfigError(problems)


def _named(told: Any) -> Iterator[str]:
    """What a section names that would be imported: its type, functions that it reads with, those of its validation."""
    if isinstance(told, str):
        yield told
    elif isinstance(told, Mapping):
        yield from (told[key] for key in ("type", *READING_OPTIONS) if isinstance(told.get(key), str))
        if "validation" in told:
            yield from _named(told["validation"])
