"""Checks the data before launch: what the ranks would refuse is refused before they start."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import colossus
from colossus.config import Config, ConfigError, model_options

if TYPE_CHECKING:
    from torch import Tensor

    from colossus.data.loader import Loaders

#: samples of a dataset that are looked at
_SAMPLES = 16


def check_given(config: Config) -> None:
    """That a config which is launched by itself names a model and data.

    Raises:
        ConfigError: for each that it lacks.
    """
    lines = {"model": "model = dict(type='GPT', ...), or your own class", "data": "data = dict(type='PythonStdlib')"}
    missing = [f"{key}: the config has none: {line}" for key, line in lines.items() if getattr(config, key) is None]
    if missing:
        raise ConfigError(missing, config.source)


def check_data(config: Config) -> Loaders | None:
    """Make the data of the first data rank, as the ranks will, and look at some of its samples.

    An error of a user's own data code is left to the ranks, who raise it with its traceback: None is returned then.

    Raises:
        ConfigError: what our own code refuses: a file that is not there, options, sizes, ids beyond the vocabulary.
    """
    # torch is imported here, once the config is known to be right in itself: it takes seconds
    from colossus.data.make_loaders import loaders_of

    try:
        loaders = loaders_of(config, config.data, data_rank=0, data_size=config.parallel.data or 1, device="cpu")
        for part in (loaders.train, loaders.validation):
            if part is not None:
                _check_samples(getattr(part.source, "dataset", None), model_options(config))
    except Exception as error:
        if isinstance(error, ValueError) and is_ours(error):
            raise ConfigError(f"data: {str(error).removeprefix('data: ')}", config.source) from error
        return None
    return loaders


def _check_samples(dataset: Any, options: Any) -> None:
    """Of a dataset whose samples are read by number; a stream is not touched."""
    from colossus.data.batch import to_tensors
    from colossus.data.tokens import TokenWindows
    from colossus.engine.inputs import model_input
    from colossus.nest import tensors
    from colossus.random import GLOBAL_RNG

    vocab_size, check = getattr(options, "vocab_size", None), getattr(options, "check_sample", None)
    if dataset is None or (vocab_size is None and check is None):
        return
    if isinstance(dataset, TokenWindows) and check is None:
        dataset.check_ids()
        return
    for number in range(min(_SAMPLES, len(dataset))):
        with GLOBAL_RNG.preserved():
            sample = to_tensors(dataset[number])
        found = list(tensors(model_input(sample)))
        if check is not None:
            _check_shapes(f"sample {number} of {type(dataset).__name__}", sample, found, check)
        if vocab_size is not None:
            _check_ids(f"sample {number} of {type(dataset).__name__}", found, vocab_size)


def _check_shapes(
    name: str, sample: Any, inputs: Sequence[tuple[str, Tensor]], check: Callable[..., list[str]]
) -> None:
    labels = sample.get("labels") if isinstance(sample, dict) else sample[-1] if isinstance(sample, tuple) else None
    is_label = isinstance(labels, int) or getattr(labels, "ndim", None) == 0
    for where, x in inputs:
        for problem in check(tuple(x.shape), int(labels) if is_label else None):  # type: ignore[arg-type]
            raise ValueError(f"{name} {where}{problem}")


def _check_ids(name: str, inputs: Sequence[tuple[str, Tensor]], vocab_size: int) -> None:
    import torch

    kinds = {x.dtype for _, x in inputs}
    if kinds and all(kind.is_floating_point for kind in kinds):
        raise ValueError(
            f"{name} has inputs of {', '.join(map(str, kinds))}, but the model takes token ids, integers from 0 to "
            f"{vocab_size - 1}"
        )
    for where, ids in inputs:
        if ids.dtype not in (torch.int64, torch.int32) or not ids.numel():
            continue
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= vocab_size:
            raise ValueError(
                f"{name} has the token id {low if low < 0 else high} in its inputs{where}, but model.vocab_size = "
                f"{vocab_size} (ids 0..{vocab_size - 1}): set model.vocab_size to {high + 1} or more, or check the data"
            )


def is_ours(error: BaseException) -> bool:
    """Whether it was raised by this package, and not by what a user's own code does."""
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and Path(frames[-1].filename).is_relative_to(Path(colossus.__file__).parent)
