"""``colossus evaluate``: the loss of a checkpoint on data. No torch until what was given is known to be right."""

from __future__ import annotations

import importlib
import json as json_module
import math
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from colossus import machine
from colossus.checkpoint.describe import printable
from colossus.checkpoint.errors import CheckpointError, DamagedCheckpoint
from colossus.config import Config, ConfigError, model_options
from colossus.config.sizes import world_size
from colossus.inference.evaluation_config import evaluation_config, training_data
from colossus.inference.plan import describe
from colossus.inference.source import find_source
from colossus.launch.command import worker_variables
from colossus.launch.data_check import check_data, is_ours
from colossus.launch.device_check import check_devices
from colossus.launch.model_check import check_model

if TYPE_CHECKING:
    from colossus.data.loader import Loaders
    from colossus.engine.results import EvalSummary

DONE, FAILED, USAGE = 0, 1, 2


def run(
    checkpoint: str | Path,
    overrides: Sequence[str] = (),
    *,
    config_file: str | None = None,
    split: str = "validation",
    nproc: int | None = None,
    json: bool = False,
) -> int:
    """Evaluate a checkpoint's model on all of its run's validation data, and print the numbers.

    Under the plan of the run, on this machine: for the same plan the loss is, to the last bit, the one that the run
    reported after the checkpoint's step over as many batches.

    Args:
        checkpoint: a checkpoint, a folder of them, a run folder, or a model folder of Hugging Face.
        overrides: of data, plan, model, ...
        config_file: takes the place of the recorded config.
        split: ``validation`` or ``train``.
        nproc: processes; 1 is this one, without the plan.
        json: print one JSON object.

    Returns:
        0 done, 1 failed at run time or a damaged checkpoint, 2 wrong usage.
    """
    try:
        if worker_variables(os.environ) is not None:
            raise ConfigError("evaluate starts its own processes: run it by itself, without torchrun or srun")
        source = find_source(checkpoint)
        config = evaluation_config(source, overrides, config_file, nproc=nproc)
        if split == "train":
            config = training_data(config)
        importlib.import_module("torch").set_num_threads(1)  # ranks that are forked hang after work on more threads
        check_devices(config, world_size(config.parallel))
        check_model(config)
        loaders = check_data(config)
        _require_data(loaders, split)
    except DamagedCheckpoint as error:
        return _say(str(error), FAILED)
    except (ConfigError, CheckpointError) as error:
        return _say(str(error), USAGE)
    # torch is imported here
    from colossus.context.local_ranks import RanksFailed
    from colossus.inference.evaluation_ranks import evaluate

    step = "" if source.is_foreign else f", step {source.manifest.step}"
    _tell(f"{source.folder}{step}: {describe(config)}")
    if loaders is not None:
        _tell(_data_line(loaders, split))
    if (count := world_size(config.parallel)) > (cores := machine.usable_cores()):
        _tell(f"{count} processes on {cores} cores: --nproc 1, or another plan, is faster where the model fits")
    began = time.perf_counter()
    try:
        summary = evaluate(source.folder, config)
    except RanksFailed as error:
        return _say(f"evaluate failed: {error}", FAILED)
    except CheckpointError as error:
        return _say(str(error), FAILED if isinstance(error, DamagedCheckpoint) else USAGE)
    except ValueError as error:
        if not is_ours(error):  # a user's own code, with its traceback
            raise
        return _say(str(error), USAGE)
    numbers = _numbers(summary, config, loaders)
    seconds = time.perf_counter() - began
    if json:
        told = {
            "checkpoint": str(source.folder),
            "step": source.manifest.step,
            "split": split,
            "plan": describe(config),
        }
        shown = {key: value if math.isfinite(value) else None for key, value in numbers.items()}
        print(json_module.dumps({**told, **shown, "seconds": seconds}, indent=2))
    else:
        rows = {**{key: f"{value:.6g}" for key, value in numbers.items() if isinstance(value, float)}}
        rows |= {counted(config): f"{summary.tokens:,}", "seconds": f"{seconds:.1f}"}
        print("\n".join(f"{key.replace('_', ' '):<14} {value}" for key, value in rows.items()))
        for line in _notes(config):
            _tell(line)
    return DONE


def counted(config: Config) -> str:
    """What the loss counts, in words: tokens, images."""
    return str(getattr(model_options(config), "counted", "tokens"))


def _require_data(loaders: Loaders | None, split: str) -> None:
    if loaders is not None and loaders.validation is None:
        raise ConfigError(
            f"there is no {split} data: {loaders.validation_missing}; --split train evaluates the training data, "
            f"data.validation=dict(path=...) or data.type=... other data"
        )


def _data_line(loaders: Loaders, split: str) -> str:
    described = loaders.description.partition("; validation: ")[2]
    return f"{split} data: {described}"


def _numbers(summary: EvalSummary, config: Config, loaders: Loaders | None) -> dict[str, Any]:
    """Loss, perplexity, metrics, count; perplexity of a loss that is the negative log-likelihood of tokens."""
    found: dict[str, Any] = {"loss": summary.loss}
    if _is_likelihood(config):
        found["perplexity"] = math.exp(summary.loss) if summary.loss < 700 else math.inf
        tokenizer = loaders.tokenizer if loaders is not None else None
        if tokenizer is not None and tokenizer.name == "bytes":
            found["bits_per_byte"] = summary.loss / math.log(2)
    return {**found, **summary.metrics, counted(config): summary.tokens}


def _is_likelihood(config: Config) -> bool:
    options = model_options(config)
    is_language = hasattr(options, "vocab_size")
    return is_language and not getattr(options, "label_smoothing", 0) and not getattr(options, "z_loss", 0)


def _notes(config: Config) -> list[str]:
    options = model_options(config)
    if not hasattr(options, "vocab_size") or _is_likelihood(config):
        return []
    return [
        "no perplexity: the loss has label smoothing or a z-loss; model.label_smoothing=0 model.z_loss=0 leave it out"
    ]


def _tell(line: str) -> None:
    print(f"colossus: {printable(line)}", file=sys.stderr, flush=True)


def _say(problem: str, code: int) -> int:
    print(f"colossus: {printable(problem)}", file=sys.stderr)
    return code
