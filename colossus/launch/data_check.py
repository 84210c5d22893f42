"""Checks the data before launch: what the ranks would refuse is refused before they start."""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Any

import colossus
from colossus.config import Config, ConfigError, model_options

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


def check_data(config: Config) -> None:
    """Make the data of the first data rank, as the ranks will, and look at some of its ids.

    An error of a user's own data code is left to the ranks, who raise it with its traceback.

    Raises:
        ConfigError: what our own code refuses: a file that is not there, options, sizes, ids beyond the vocabulary.
    """
    # torch is imported here, once the config is known to be right in itself: it takes seconds
    from colossus.data.make_loaders import loaders_of

    try:
        loaders = loaders_of(config, config.data, data_rank=0, data_size=config.parallel.data or 1, device="cpu")
        for part in (loaders.train, loaders.validation):
            if part is not None:
                _check_ids(getattr(part.source, "dataset", None), getattr(model_options(config), "vocab_size", None))
    except Exception as error:
        if isinstance(error, ValueError) and _is_ours(error):
            raise ConfigError(f"data: {str(error).removeprefix('data: ')}", config.source) from error


def _check_ids(dataset: Any, vocab_size: int | None) -> None:
    """Of a dataset whose samples are read by number; a stream is not touched."""
    import torch

    from colossus.data.batch import to_tensors
    from colossus.data.windows import TokenWindows
    from colossus.engine.inputs import model_input
    from colossus.nest import tensors
    from colossus.random import GLOBAL_RNG

    if dataset is None or vocab_size is None:
        return
    if isinstance(dataset, TokenWindows):
        dataset.check_ids()
        return
    for number in range(min(_SAMPLES, len(dataset))):
        with GLOBAL_RNG.preserved():
            sample = to_tensors(dataset[number])
        for where, ids in tensors(model_input(sample)):
            if ids.dtype not in (torch.int64, torch.int32) or not ids.numel():
                continue
            low, high = int(ids.min()), int(ids.max())
            if low < 0 or high >= vocab_size:
                raise ValueError(
                    f"sample {number} of {type(dataset).__name__} has the token id {low if low < 0 else high} in its "
                    f"inputs{where}, but model.vocab_size = {vocab_size} (ids 0..{vocab_size - 1}): set "
                    f"model.vocab_size to {high + 1} or more, or check the data"
                )


def _is_ours(error: BaseException) -> bool:
    """Whether it was raised by this package, and not by what a user's own code does."""
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and Path(frames[-1].filename).is_relative_to(Path(colossus.__file__).parent)
