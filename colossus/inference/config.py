"""The configs of generation and evaluation: weights, the plan, and the choice of tokens. No torch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from colossus.checkpoint.manifest import BYTES, MANIFEST, TOKENIZER_FILE, Manifest
from colossus.checkpoint.weight_sources import find_weights, manifest_of
from colossus.config import Config, ConfigError, load_config, model_options
from colossus.config.components import check_names, is_text
from colossus.config.loading import read_file, validate, with_tokenizer
from colossus.config.overrides import apply_overrides
from colossus.config.plans import describe_plan, world_size
from colossus.config.section import Named
from colossus.config.training import LOW, PrecisionSection
from colossus.registry import DATASETS, MODELS, SCHEDULES

#: sections of a recorded config that evaluations use
_EVALUATE_SECTIONS = ("model", "data", "parallel", "schedule", "train", "comm", "device", "checkpoint")
#: keys of the section train that only training uses
_TRAINING_KEYS = ("activation_checkpoint", "batch_ramp", "steps", "schedule_steps", "eval_every", "eval_batches")
_DTYPES = {"float64": "fp64", "float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


@dataclass(frozen=True)
class WeightSource:
    """Weights with their manifest, in the folder of a checkpoint or of Hugging Face.

    Attributes:
        average: the kind of average in place of the parameters; None for the parameters.
    """

    folder: Path
    manifest: Manifest
    average: str | None = None

    @property
    def is_foreign(self) -> bool:
        """True for a folder of Hugging Face."""
        return not (self.folder / MANIFEST).exists()

    @property
    def token_ids(self) -> Mapping[str, Any]:
        """``eos_token_id`` and the like, for a model from Hugging Face."""
        return self.manifest.config.get("token_ids") or {}


def find_source(path: Path | str, average: str | None = None) -> WeightSource:
    """Return the weights in a checkpoint, a folder of checkpoints, a run folder, or a folder of Hugging Face.

    Args:
        average: "ema" or "swa", the average of the weights that a hook saved, in place of the parameters.

    Raises:
        CheckpointError: there are none, or they are not whole.
    """
    folder = find_weights(path)
    return WeightSource(folder, manifest_of(folder, average), average)


@dataclass(frozen=True)
class Sampling:
    """Temperature, then top-k, then top-p (1904.09751), each applied to the result of the one before.

    Attributes:
        temperature: divisor of the logits: below 1 likely tokens become likelier.
        top_k: restricts the choice to so many of the likeliest tokens, and those as likely as the last of them; None:
            all.
        top_p: restricts the choice to the likeliest tokens whose probabilities together reach it, at least one; 1: all.
        greedy: take the likeliest token, the first of equals; the other options then have no effect.
        seed: the seed of the random numbers. They depend on it, on the row of the prompt, and on the position of the
            token.

    Raises:
        ConfigError: a value is out of range.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    greedy: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        allowed = (
            ("seed", self.seed >= 0, "0 or more"),
            ("temperature", 0 < self.temperature < math.inf, "above 0 and finite; greedy takes the likeliest token"),
            ("top_k", self.top_k is None or self.top_k >= 1, "at least 1; leave it out for all tokens"),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1 (1 keeps all)"),
        )
        for key, is_allowed, what in allowed:
            if not is_allowed:
                raise ConfigError(f"{key} = {getattr(self, key)}: it must be {what}")


# -- generation -------------------------------------------------------------------------------------------


def generation_config(source: WeightSource, overrides: Sequence[str] = (), config_file: str | None = None) -> Config:
    """Return a config of the checkpoint's model in one process, unless the overrides set a plan.

    Args:
        overrides: ``parallel.tensor=2``, ``train.precision=bf16``, ...
        config_file: a file with the model, where that is a class of the user's own.

    Raises:
        ConfigError: the plan does not fit the model, or serves only training.
    """
    values = _recorded(source, config_file, ("model",))
    values["train"] = {"precision": _recorded_precision(source)}
    stated = validate(apply_overrides(values, overrides))
    check_names(stated)
    _require_generation(stated)
    # samples are repeated until they divide over the ranks, so any number that divides will do
    batch = world_size(stated.parallel.model_copy(update={"data": stated.parallel.data or 1}))
    config = load_config(values, [*overrides, f"train.global_batch_size={batch}"])
    precision = config.train.precision
    if precision.compute in LOW:  # store weights in the compute dtype: casting once equals casting at every use
        reduce = precision.reduce if precision.reduce != "fp64" else "fp32"
        stored = PrecisionSection(params=precision.compute, compute=precision.compute, reduce=reduce, optimizer="fp32")
        config = config.model_copy(update={"train": config.train.model_copy(update={"precision": stored})})
    return config.model_copy(update={"name": "generate", "model": _without_tuning(config)})


def _without_tuning(config: Config) -> Named | None:
    """Return the model without the loss and the reference of its training."""
    if config.model is None or model_options(config) is None:
        return config.model
    own = config.model.spec()
    return Named(**{key: value for key, value in own.items() if key not in ("objective", "reference")})


def _require_generation(config: Config) -> None:
    parallel, options = config.parallel, model_options(config)
    refused = {
        f"parallel.sequence = {parallel.sequence.size}": parallel.sequence.size > 1,
        "parallel.tensor.sequence_sharded": parallel.tensor.sequence_sharded,
        f"parallel.zero = {parallel.zero.stage}": parallel.zero.stage,
        "parallel.strategy": "strategy" in parallel.model_fields_set,
    }
    if key := next((key for key, is_set in refused.items() if is_set), None):
        raise ConfigError(
            f"{key} splits tokens, or the state of training, but generate makes one token after the other: use "
            f"parallel.tensor or parallel.pipeline, which split the model, or parallel.data, which splits the prompts"
        )
    is_language = hasattr(options, "vocab_size") and getattr(options, "generates", True)
    if config.model is not None and options is not None and not is_language:
        raise ConfigError(
            f"model {config.model.type!r} predicts no next token: generate takes a language model (GPT, ..)"
        )


def num_positions(config: Config) -> int | None:
    """Return the number of learned positions of a model, None if it has none, or does not tell."""
    options: Any = model_options(config)
    return None if getattr(options, "is_rotary", True) else int(options.seq_len)


def prompt_problems(prompts: Sequence[Sequence[int]], positions: int | None, vocab_size: int | None) -> list[str]:
    """Return why a model with so many positions and tokens cannot continue these prompts."""
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
    """Return the config of a checkpoint's run, with all of its validation data, unless the overrides set another.

    Args:
        config_file: a config file in place of the recorded config.
        nproc: number of processes. 1: in this process, without a plan; another one than the plan has derives
            ``parallel.data``. None is the plan of the run.

    Raises:
        ConfigError: for an invalid config, a plan that does not fit, or code that the checkpoint names.
    """
    keys = {text.partition("=")[0] for text in overrides}
    sections = [key for key in _EVALUATE_SECTIONS if key != "data" or not {"data", "data.type"} & keys]
    values = _recorded(source, config_file, sections)
    plan, train = dict(values.get("parallel") or {}), dict(values.get("train") or {})
    plan.pop("strategy", None)  # an evaluation exchanges no gradients
    if nproc is not None:
        plan = {} if nproc == 1 else {key: value for key, value in plan.items() if key != "data"}
    train.setdefault("precision", _recorded_precision(source))
    values.update(_of_reference(values["model"], values.pop("checkpoint", None), source.manifest.config))
    schedule = values.get("schedule") or {}
    if isinstance(schedule, Mapping) and schedule.get("type", "1f1b") not in SCHEDULES:  # a user's own schedule
        schedule = {"microbatches": schedule.get("microbatches", 1)}
    train = {key: value for key, value in train.items() if key not in _TRAINING_KEYS}
    config = load_config({**values, "parallel": plan, "train": train, "schedule": schedule}, overrides, nproc)
    config._source = Path(config_file).name if config_file is not None else None
    if config.data is None:
        raise ConfigError(
            f"{source.folder} records no data, since the run got its data from code: pass data, such as "
            f"data.type=TextFolder data.path=..., or --config FILE"
        )
    config = _with_its_tokenizer(config, source)
    most = config.train.eval_batches if {"train", "train.eval_batches"} & keys else None
    train_section = config.train.model_copy(update={"eval_batches": most})
    return config.model_copy(update={"name": "evaluate", "train": train_section})


def _of_reference(model: Any, checkpoint: Any, recorded: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sections from which `take_reference` takes a reference's weights: where they name none, as recorded.

    A command of the run may have named them.
    """
    if not isinstance(model, Mapping) or not isinstance(model.get("reference"), Mapping):
        return {}
    then, begun = recorded.get("model"), recorded.get("checkpoint")
    if not any(model["reference"].values()) and isinstance(then, Mapping) and then.get("reference"):
        model = {**model, "reference": then["reference"]}
    named = (section.get("weights") for section in (checkpoint, begun) if isinstance(section, Mapping))
    return {"model": model, "checkpoint": {"weights": next((weights for weights in named if weights), None)}}


def training_data(config: Config) -> Config:
    """Return the config with its training data, from first to last, in place of its validation data."""
    data = config.data
    if not isinstance(data, Named):
        is_maker = callable(data) and not hasattr(data, "__getitem__")
        return config.model_copy(update={"data": Named(type=data, validation={} if is_maker else data)})
    has_splits = isinstance(data.type, str) and "split" not in data.options
    validation = {"split": "train"} if has_splits else {}
    return config.model_copy(update={"data": Named(**{**data.spec(), "validation": validation})})


def _with_its_tokenizer(config: Config, source: WeightSource) -> Config:
    """Return the config with the checkpoint's tokenizer.json for its text, unless data names another.

    Raises:
        ConfigError: for text without any tokenizer: no run of colossus trained the weights.
    """
    data, tokenizer = config.data, source.manifest.tokenizer
    if tokenizer == TOKENIZER_FILE:
        return with_tokenizer(config, str(source.folder))
    is_unknown = tokenizer is None and (source.is_foreign or source.manifest.is_weights_only)
    if is_unknown and isinstance(data, Named) and is_text(data.type) and data.options.get("tokenizer") is None:
        raise ConfigError(
            f"{source.folder} has no {TOKENIZER_FILE}, so it is unknown how text becomes the ids of its model: set "
            f"data.tokenizer=PATH of one, or data.tokenizer={BYTES}"
        )
    return config


# -- both -------------------------------------------------------------------------------------------------


def describe(config: Config) -> str:
    """Return ``one process, fp32``, or ``data 1 x tensor 2 (2d), bf16``."""
    plan = "one process" if world_size(config.parallel) == 1 else describe_plan(config)
    return f"{plan}, {config.train.precision.compute}"


def _recorded(source: WeightSource, config_file: str | None, sections: Sequence[str]) -> dict[str, Any]:
    """Return sections of the config file, else the checkpoint's, with colossus's own classes by their names.

    Raises:
        ConfigError: the checkpoint names a class or an object of a user instead, or no model.
    """
    values = read_file(Path(config_file)) if config_file is not None else source.manifest.config
    recorded = {key: values[key] for key in sections if values.get(key) is not None}
    if not recorded.get("model"):
        raise ConfigError(f"{config_file or source.folder} has no model: pass --config FILE, a config file with it")
    if config_file is not None:
        return recorded
    if source.manifest.tokenizer == TOKENIZER_FILE and "data" in recorded:
        recorded["data"] = _without_tokenizer(recorded["data"])
    for key, registry in (("model", MODELS), ("data", DATASETS)):
        for unknown in [name for name in _imported_names(recorded.get(key)) if name not in registry]:
            raise ConfigError(
                f"{source.folder}: its {key} is {unknown}, none of colossus ({', '.join(registry.names())}), and "
                f"colossus never imports code that a checkpoint names: pass --config FILE, the config file of its "
                f"training{', or other data: data.type=TextFolder data.path=...' if key == 'data' else ''}"
            )
    return recorded


def _without_tokenizer(data: Any) -> Any:
    """Return data without tokenizer files, since those of the run may be gone."""
    if not isinstance(data, Mapping):
        return data
    rest = {key: value for key, value in data.items() if key != "tokenizer" or value == BYTES}
    return {**rest, "validation": _without_tokenizer(rest["validation"])} if "validation" in rest else rest


def _imported_names(section: Any) -> Iterator[str]:
    """Yield the names that a section imports: its type, its collate_fn or factory, those of its validation."""
    if isinstance(section, str):
        yield section
    elif isinstance(section, Mapping):
        yield from (section[key] for key in ("type", "collate_fn", "factory") if isinstance(section.get(key), str))
        yield from _imported_names(section.get("validation"))


def _recorded_precision(source: WeightSource) -> dict[str, Any]:
    """Return the precision of the run, or of the first weight where the folder records none."""
    of_run = (source.manifest.config.get("train") or {}).get("precision")
    if isinstance(of_run, Mapping):
        return dict(of_run)
    dtypes = (entry.dtype for key, entry in source.manifest.tensors.items() if key.startswith("model/"))
    name = next((_DTYPES[dtype] for dtype in dtypes if dtype in _DTYPES), "fp32")
    return PrecisionSection.keys_of(name) or {}
