"""The plan under which a checkpoint generates: its model, the plan that the overrides say. No torch."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from colossus.config import Config, ConfigError, load_config, model_options
from colossus.config.loading import validate
from colossus.config.overrides import apply_overrides
from colossus.config.plans import check_names
from colossus.config.sizes import describe_sizes, world_size
from colossus.config.training import LOW, PrecisionSection
from colossus.inference.source import Source
from colossus.registry import MODEL_OPTIONS, MODELS

#: keys that mean something without training
_KEYS = ("parallel", "train.precision", "comm", "device")
_KEY = re.compile(r"\w+(\.[\w-]+)*")
_DTYPES = {"float64": "fp64", "float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


def plan_config(source: Source, overrides: Sequence[str] = (), config_file: str | None = None) -> Config:
    """A config of the checkpoint's model under one process, unless the overrides say otherwise.

    Args:
        overrides: ``parallel.tensor=2``, ``train.precision=bf16``, ...
        config_file: with the model, where that is a class of the user's own.

    Raises:
        ConfigError: for a plan that does not fit the model, or means nothing without training.
    """
    _require_known_keys(overrides)
    values = {
        "name": "generate",
        "model": _model(source, config_file),
        "train": {"precision": recorded_precision(source)},
    }
    stated = validate(apply_overrides(values, overrides), overrides)
    check_names(stated)
    _require_parallel(stated)
    # samples are repeated until they divide: any number that does
    batch = world_size(stated.parallel.model_copy(update={"data": stated.parallel.data or 1}))
    config = load_config(values, [*overrides, f"train.global_batch_size={batch}"])
    precision = _for_inference(config.train.precision)
    return config.model_copy(update={"train": config.train.model_copy(update={"precision": precision})})


def num_positions(config: Config) -> int | None:
    """Of a model with learned positions, how many: there is nothing beyond them. None where it does not say."""
    options: Any = model_options(config)
    return None if getattr(options, "is_rotary", True) else int(options.seq_len)


def trained_length(config: Config) -> int | None:
    """Tokens of the sequences that the model was made for."""
    return getattr(model_options(config), "seq_len", None)


def vocabulary_size(config: Config) -> int | None:
    return getattr(model_options(config), "vocab_size", None)


def describe(config: Config) -> str:
    """``one process, fp32``, or ``tensor 2 (2d), bf16``."""
    precision, tensor = config.train.precision, config.parallel.tensor
    mode = f" ({tensor.mode})" if tensor.size > 1 else ""
    ranks = world_size(config.parallel)
    sizes = describe_sizes(config.parallel.model_copy(update={"data": None} if config.parallel.data == 1 else {}))
    plan = "one process" if ranks == 1 else f"{sizes}{mode}"
    return f"{plan}, {precision.compute}"


def _model(source: Source, config_file: str | None) -> Any:
    if config_file is not None:
        given = load_config(config_file).model
        if given is None:
            raise ConfigError("has no model", Path(config_file).name)
        return _without_checkpointing(given.spec())
    model = dict(source.model)
    kind = model.get("type")
    if kind is None:
        raise ConfigError(
            f"{source.folder}: does not say what its model is, which was given to colossus.initialize: give "
            f"--config FILE, a config file with the model"
        )
    if kind not in MODELS:
        raise ConfigError(
            f"{source.folder}: its model is {kind}, no model of colossus, and code is never imported because a "
            f"checkpoint names it: give --config FILE, the config file that it was trained with"
        )
    return _without_checkpointing(model)


def _without_checkpointing(model: dict[str, Any]) -> dict[str, Any]:
    """Nothing is kept for a backward that never comes."""
    return {**model, "activation_checkpoint": "none"} if "activation_checkpoint" in model else model


def recorded_precision(source: Source) -> dict[str, Any]:
    """That of the run; of a folder that does not say, that of most of its tensors."""
    train = source.manifest.config.get("train")
    recorded = train.get("precision") if isinstance(train, Mapping) else None
    if isinstance(recorded, Mapping):
        return dict(recorded)
    counts = Counter(entry.dtype for key, entry in source.manifest.tensors.items() if key.startswith("model/"))
    name = next((_DTYPES[dtype] for dtype, _ in counts.most_common() if dtype in _DTYPES), "fp32")
    return PrecisionSection.keys_of(name) or {}


def _for_inference(given: PrecisionSection) -> PrecisionSection:
    """Weights are kept in the dtype in which they are multiplied: casting them once or at every use is the same."""
    if given.compute not in LOW:
        return given
    reduce = given.reduce if given.reduce != "fp64" else "fp32"
    return PrecisionSection(params=given.compute, compute=given.compute, reduce=reduce, optimizer="fp32")


def _require_known_keys(overrides: Sequence[str]) -> None:
    problems = []
    for text in overrides:
        key = text.partition("=")[0]
        if "=" not in text or not _KEY.fullmatch(key):
            what = "is no override:" if "=" in text else "has no '=':"
            problems.append(f"{text!r} {what} overrides are section.key=value, and a prompt is given as --prompt TEXT")
        elif not any(key == known or key.startswith(f"{known}.") for known in _KEYS):
            problems.append(
                f"{text}: generate trains nothing, and the model is that of the checkpoint; it takes "
                f"{', '.join(f'{known}..' for known in _KEYS)}"
            )
    if problems:
        raise ConfigError(problems)


def _require_parallel(config: Config) -> None:
    parallel = config.parallel
    problems = []
    if parallel.sequence.size > 1:
        problems.append(
            f"parallel.sequence = {parallel.sequence.size} splits the tokens of a sequence, but generate makes them "
            f"one after the other: take parallel.tensor={parallel.sequence.size} or parallel.pipeline="
            f"{parallel.sequence.size}, which split the model"
        )
    if parallel.tensor.sequence_sharded:
        problems.append(
            "parallel.tensor.sequence_sharded splits the tokens between blocks, but generate has one at a time: leave "
            "it out, the text is the same"
        )
    if parallel.zero.stage:
        problems.append(
            f"parallel.zero = {parallel.zero.stage} shards what training needs, or gathers each weight for each token: "
            f"take parallel.tensor or parallel.pipeline to split the weights"
        )
    if "strategy" in parallel.model_fields_set:
        problems.append("parallel.strategy says what data ranks exchange in training: leave it out")
    options = model_options(config)
    is_language = hasattr(options, "vocab_size") and hasattr(options, "seq_len") and getattr(options, "generates", True)
    if options is not None and not is_language:
        problems.append(
            f"model {config.model.type if config.model else ''!r} gives no next token: generate takes a language model "
            f"({', '.join(_language_models())})"
        )
    if problems:
        raise ConfigError(problems)


def _language_models() -> list[str]:
    options = {name: MODEL_OPTIONS.get(name) for name in MODEL_OPTIONS.names()}
    return [name for name, kind in options.items() if getattr(kind, "generates", False)]
