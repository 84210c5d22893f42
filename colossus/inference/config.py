"""What is run of a checkpoint: where its weights are, under which config, and how tokens are chosen. No torch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from colossus.checkpoint.manifest import BYTES, MANIFEST, TOKENIZER_FILE, Manifest
from colossus.checkpoint.weight_sources import find_weights, manifest_of
from colossus.config import Config, ConfigError, load_config, model_options
from colossus.config.components import is_text
from colossus.config.loading import read_file, validate, with_tokenizer
from colossus.config.overrides import apply_overrides
from colossus.config.plans import check_names, describe_plan, world_size
from colossus.config.section import Named
from colossus.config.training import LOW, PrecisionSection
from colossus.registry import DATASETS, MODELS, SCHEDULES

#: what evaluations look at of a recorded config
_EVALUATE_SECTIONS = ("model", "data", "parallel", "schedule", "train", "comm", "device")
#: keys of the section train that say how to train
_OF_TRAINING = ("activation_checkpoint", "batch_ramp", "steps", "schedule_steps", "eval_every", "eval_batches")
_DTYPES = {"float64": "fp64", "float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


@dataclass(frozen=True)
class WeightSource:
    """Weights and what is known of them: the folder of a checkpoint, or of Hugging Face; where it is not None, the
    average of them that is meant."""

    folder: Path
    manifest: Manifest
    average: str | None = None

    @property
    def is_foreign(self) -> bool:
        """Whether it is a folder of Hugging Face."""
        return not (self.folder / MANIFEST).exists()

    @property
    def token_ids(self) -> Mapping[str, Any]:
        """``eos_token_id`` and the like, of a model that came from Hugging Face."""
        return self.manifest.config.get("token_ids") or {}


def find_source(path: Path | str, average: str | None = None) -> WeightSource:
    """The model that a user means: a checkpoint, a folder of them, a run folder, or a folder of Hugging Face.

    Args:
        average: of the weights that a hook has kept, "ema" or "swa", in the place of the parameters.

    Raises:
        CheckpointError: when there is none, or it is not whole.
    """
    found = find_weights(path)
    return WeightSource(found, manifest_of(found, average), average)


@dataclass(frozen=True)
class Sampling:
    """Temperature, then top-k, then top-p (1904.09751), each on what the one before has left.

    Attributes:
        temperature: logits are divided by it: below 1 likely tokens become likelier.
        top_k: only as many of the likeliest tokens (and those as likely as the last of them); None: all.
        top_p: only the likeliest tokens whose probabilities together reach it, at least one; 1: all.
        greedy: the likeliest token, the first of equals, whatever the rest says.
        seed: of the random numbers, which are a function of it, the row of the prompt, and the position of the token.

    Raises:
        ConfigError: for values that mean nothing.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    greedy: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        allowed = (
            ("seed", self.seed >= 0, "0 or more"),
            ("temperature", 0 < self.temperature < math.inf, "above 0 and finite; for the likeliest token take greedy"),
            ("top_k", self.top_k is None or self.top_k >= 1, "at least 1; leave it out for all tokens"),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1 (1 keeps all)"),
        )
        for key, is_allowed, what in allowed:
            if not is_allowed:
                raise ConfigError(f"{key} = {getattr(self, key)}: it must be {what}")


# -- generation -------------------------------------------------------------------------------------------


def generation_config(source: WeightSource, overrides: Sequence[str] = (), config_file: str | None = None) -> Config:
    """A config of the checkpoint's model under one process, unless the overrides say otherwise.

    Args:
        overrides: ``parallel.tensor=2``, ``train.precision=bf16``, ...
        config_file: with the model, where that is a class of the user's own.

    Raises:
        ConfigError: for a plan that does not fit the model, or means nothing without training.
    """
    values = _recorded(source, config_file, ("model",))
    values["train"] = {"precision": _recorded_precision(source)}
    stated = validate(apply_overrides(values, overrides))
    check_names(stated)
    _require_generation(stated)
    # samples are repeated until they divide: any number that does
    batch = world_size(stated.parallel.model_copy(update={"data": stated.parallel.data or 1}))
    config = load_config(values, [*overrides, f"train.global_batch_size={batch}"])
    precision = config.train.precision
    if precision.compute in LOW:  # weights are kept as they are multiplied: cast once or at every use is the same
        reduce = precision.reduce if precision.reduce != "fp64" else "fp32"
        kept = PrecisionSection(params=precision.compute, compute=precision.compute, reduce=reduce, optimizer="fp32")
        config = config.model_copy(update={"train": config.train.model_copy(update={"precision": kept})})
    return config.model_copy(update={"name": "generate"})


def _require_generation(config: Config) -> None:
    parallel, options = config.parallel, model_options(config)
    given = {
        f"parallel.sequence = {parallel.sequence.size}": parallel.sequence.size > 1,
        "parallel.tensor.sequence_sharded": parallel.tensor.sequence_sharded,
        f"parallel.zero = {parallel.zero.stage}": parallel.zero.stage,
        "parallel.strategy": "strategy" in parallel.model_fields_set,
    }
    if key := next((key for key, is_given in given.items() if is_given), None):
        raise ConfigError(
            f"{key} splits tokens, or what training needs, but generate makes one token after the other: take "
            f"parallel.tensor or parallel.pipeline, which split the model, or parallel.data, which splits the prompts"
        )
    is_language = hasattr(options, "vocab_size") and getattr(options, "generates", True)
    if config.model is not None and options is not None and not is_language:
        raise ConfigError(f"model {config.model.type!r} gives no next token: generate takes a language model (GPT, ..)")


def num_positions(config: Config) -> int | None:
    """Of a model with learned positions, how many: there is nothing beyond them. None where it does not say."""
    options: Any = model_options(config)
    return None if getattr(options, "is_rotary", True) else int(options.seq_len)


def prompt_problems(prompts: Sequence[Sequence[int]], positions: int | None, vocab_size: int | None) -> list[str]:
    """Why a model with so many positions and tokens cannot continue these prompts."""
    problems = [] if prompts else ["there is no prompt"]
    for number, tokens in enumerate(prompts, 1):
        largest = max(tokens, default=0)
        if not tokens:
            problems.append(f"prompt {number} is empty: a model continues at least one token")
        elif positions is not None and len(tokens) > positions:
            problems.append(f"prompt {number} has {len(tokens)} tokens, the model has learned {positions} positions")
        elif vocab_size is not None and largest >= vocab_size:
            problems.append(f"prompt {number} has the token {largest}, the model has the tokens 0..{vocab_size - 1}")
    return problems


# -- evaluation -------------------------------------------------------------------------------------------


def evaluation_config(
    source: WeightSource, overrides: Sequence[str] = (), config_file: str | None = None, *, nproc: int | None = None
) -> Config:
    """The config of a checkpoint's run, with all of its validation data, unless the overrides say otherwise.

    Args:
        config_file: takes the place of what the checkpoint records.
        nproc: number of processes. 1: in this process, without a plan; another one than the plan has derives
            ``parallel.data``. None is the plan of the run.

    Raises:
        ConfigError: for what is no config, a plan that does not fit, code that the checkpoint names.
    """
    keys = {text.partition("=")[0] for text in overrides}
    sections = [key for key in _EVALUATE_SECTIONS if key != "data" or not {"data", "data.type"} & keys]
    values = _recorded(source, config_file, sections)
    plan, train = dict(values.get("parallel") or {}), dict(values.get("train") or {})
    plan.pop("strategy", None)  # no replica tells another of a gradient
    if nproc is not None:
        plan = {} if nproc == 1 else {key: value for key, value in plan.items() if key != "data"}
    train.setdefault("precision", _recorded_precision(source))
    schedule = values.get("schedule") or {}
    if isinstance(schedule, Mapping) and schedule.get("type", "1f1b") not in SCHEDULES:  # of a user's own
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
    most = config.train.eval_batches if {"train", "train.eval_batches"} & keys else None
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


def _with_its_tokenizer(config: Config, source: WeightSource) -> Config:
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


# -- both -------------------------------------------------------------------------------------------------


def describe(config: Config) -> str:
    """``one process, fp32``, or ``data 1 x tensor 2 (2d), bf16``."""
    plan = "one process" if world_size(config.parallel) == 1 else describe_plan(config)
    return f"{plan}, {config.train.precision.compute}"


def _recorded(source: WeightSource, config_file: str | None, sections: Sequence[str]) -> dict[str, Any]:
    """Sections of the config file, else those that the checkpoint records: of colossus, by their names.

    Raises:
        ConfigError: where the checkpoint has the name of a class or an object of a user instead, or no model.
    """
    values = read_file(Path(config_file)) if config_file is not None else source.manifest.config
    found = {key: values[key] for key in sections if values.get(key) is not None}
    if not found.get("model"):
        raise ConfigError(f"{config_file or source.folder} has no model: give --config FILE, a config file with it")
    if config_file is not None:
        return found
    if source.manifest.tokenizer == TOKENIZER_FILE and "data" in found:
        found["data"] = _without_tokenizer(found["data"])
    for key, registry in (("model", MODELS), ("data", DATASETS)):
        for unknown in [each for each in _imported_names(found.get(key)) if each not in registry]:
            raise ConfigError(
                f"{source.folder}: its {key} is {unknown}, none of colossus ({', '.join(registry.names())}), and "
                f"code is never imported because a checkpoint names it: give --config FILE, the config file that it "
                f"was trained with{', or other data: data.type=TextFolder data.path=...' if key == 'data' else ''}"
            )
    return found


def _without_tokenizer(data: Any) -> Any:
    """Data without tokenizer files: those that the run was given may be gone."""
    if not isinstance(data, Mapping):
        return data
    kept = {key: value for key, value in data.items() if key != "tokenizer" or value == BYTES}
    return {**kept, "validation": _without_tokenizer(kept["validation"])} if "validation" in kept else kept


def _imported_names(section: Any) -> Iterator[str]:
    """What would be imported for a section: its type, its collate_fn or factory, those of its validation."""
    if isinstance(section, str):
        yield section
    elif isinstance(section, Mapping):
        yield from (section[key] for key in ("type", "collate_fn", "factory") if isinstance(section.get(key), str))
        yield from _imported_names(section.get("validation"))


def _recorded_precision(source: WeightSource) -> dict[str, Any]:
    """That of the run; of a folder that does not say, that of its first weight."""
    of_run = (source.manifest.config.get("train") or {}).get("precision")
    if isinstance(of_run, Mapping):
        return dict(of_run)
    dtypes = (entry.dtype for key, entry in source.manifest.tensors.items() if key.startswith("model/"))
    name = next((_DTYPES[dtype] for dtype in dtypes if dtype in _DTYPES), "fp32")
    return PrecisionSection.keys_of(name) or {}
