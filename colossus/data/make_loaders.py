"""From whatever a config holds under ``data`` to the loaders of a data rank."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from colossus.checkpoint.manifest import TOKENIZER_FILE
from colossus.config import Config, model_options
from colossus.data.from_config import DataSpec, make_source, parse_data
from colossus.data.loader import Loader, Loaders, ValidationLoader
from colossus.data.passes import ONE_PASS
from colossus.data.sampler import local_batch_size
from colossus.data.sources import BatchShard, MapSource, Source
from colossus.data.streams import StreamSource
from colossus.data.tokenizer import DatasetTokenizer, dataset_tokenizer
from colossus.data.windows import TooLittleData
from colossus.random import check_seed


def build_loaders(
    data: Any,
    *,
    seed: int,
    global_batch_size: int,
    data_rank: int,
    data_size: int,
    seq_len: int | None = None,
    vocab_size: int | None = None,
    pairs: int | None = None,
    device: torch.device | str = "cpu",
    eval_batch_size: int | None = None,
) -> Loaders:
    """Loaders for whatever a config holds under ``data``.

    Args:
        data: one of

            * ``dict(type=name or callable, **options)`` or a name of `colossus.registry.DATASETS`;
            * a map-style dataset (``__getitem__`` and ``__len__``; lists too), read in the order of `sample_indices`;
            * an IterableDataset: every rank must see the same stream; each data rank keeps its shard of each batch;
            * a DataLoader, or any iterable of ready batches: taken as it is. Its batches hold ``global_batch_size``
              samples (each data rank takes its slice), or that over ``data_size`` when its sampler is per rank;
            * a callable that gives one of these. It gets those of the arguments below, and ``split``, that
              it names; with ``split`` it is called for ``"train"`` and for ``"validation"``.

            In the dict also: ``num_workers`` and ``collate_fn`` for datasets; ``per_rank=True`` for batches that
            differ between data ranks; ``read_ahead=False`` for data that depends on the steps before it (else, on
            CUDA, one batch more than was taken is read and copied); ``validation``: None or False for none, a dict of
            options in place of those for training, or data of any kind above.
        eval_batch_size: samples of a validation batch over all data ranks, ``global_batch_size`` when not given.

    Raises:
        ValueError: sizes that do not divide, unknown names or options, data that cannot be read as stated.
    """
    check_seed(seed)
    local_batch_size(global_batch_size, data_size)
    eval_size = global_batch_size if eval_batch_size is None else eval_batch_size
    local_batch_size(eval_size, data_size, "train.eval_batch_size")
    if not 0 <= data_rank < data_size:
        raise ValueError(f"data_rank = {data_rank} is outside 0..{data_size - 1}")
    device = torch.device(device)
    defaults = {
        "seed": seed,
        "global_batch_size": global_batch_size,
        "data_rank": data_rank,
        "data_size": data_size,
        "seq_len": seq_len,
        "vocab_size": vocab_size,
    }
    if pairs is not None:
        defaults["pairs"] = pairs
    spec = parse_data(data)
    train_shard = BatchShard(seed, global_batch_size, data_rank, data_size, endless=True)
    train_data = spec.build({**defaults, "split": "train"} if spec.takes_split else defaults)
    _check_vocabulary(train_data, vocab_size)
    train = Loader(make_source(train_data, train_shard, spec.reading_options), shard=train_shard, device=device)
    if isinstance(train.source, MapSource) and train.source.num_samples < global_batch_size:
        raise ValueError(
            f"{type(train_data).__name__} has {train.source.num_samples} samples, fewer than train.global_batch_size = "
            f"{global_batch_size}: a batch would hold samples several times; give more data, or set "
            f"train.global_batch_size to {train.source.num_samples} or less"
        )

    eval_shard = BatchShard(seed, eval_size, data_rank, data_size, endless=False)
    source, eval_data, missing = _validation(spec, {**defaults, "split": "validation"}, eval_shard)
    _check_vocabulary(eval_data, vocab_size)
    _check_own_place(train.source, source)
    tokenizer, not_recorded = _told_tokenizer(train_data)
    _check_same_tokens(tokenizer, getattr(eval_data, "tokenizer", None))
    description = f"train: {_describe(train_data)}; validation: {missing or _describe(eval_data)}"
    validation = None if source is None else ValidationLoader(source, shard=eval_shard, device=device)
    return Loaders(train, validation, description, missing if source is None else None, tokenizer, not_recorded)


def loaders_of(config: Config, data: Any, *, data_rank: int, data_size: int, device: torch.device | str) -> Loaders:
    """Loaders for a data rank of a config's run.

    Args:
        data: what is read: the config's own, or what was passed in its place.

    Raises:
        ValueError: see `build_loaders`.
    """
    options, train = model_options(config), config.train
    return build_loaders(
        data.spec() if hasattr(data, "spec") else data,
        seed=train.seed,
        global_batch_size=train.global_batch_size,
        data_rank=data_rank,
        data_size=data_size,
        seq_len=getattr(options, "seq_len", None),
        vocab_size=getattr(options, "vocab_size", None),
        pairs=getattr(options, "pairs", None),
        device=device,
        eval_batch_size=train.eval_batch_size,
    )


def _validation(spec: DataSpec, defaults: dict[str, Any], shard: BatchShard) -> tuple[Source | None, Any, str | None]:
    """Source and data for validation, or the reason why there is none.

    Held-out data that the config did not ask for by name may turn out too small, then there is none;
    data that it names must do.
    """
    wanted = spec.validation
    if wanted is None or wanted is False:
        return None, None, "none (data.validation says so)"
    if wanted is not DataSpec.UNSET:
        chosen = _validation_spec(spec, wanted)
        data = chosen.build(defaults if chosen.takes_split else {**defaults, "split": None})
        return _eval_source(data, shard, chosen.reading_options), data, None
    if not spec.takes_split:
        return None, None, "none (give data.validation, or a type that takes split='validation')"
    try:
        data = spec.build(defaults)
    except TooLittleData as error:
        return None, None, f"none ({error})"
    return _eval_source(data, shard, spec.reading_options), data, None


def _validation_spec(spec: DataSpec, wanted: Any) -> DataSpec:
    """``validation=dict(...)`` without a type: the training data's type and options, with these in their place."""
    if isinstance(wanted, dict) and "type" not in wanted:
        if spec.factory is None:
            raise ValueError("data.validation needs a 'type': the training data was made by the config itself")
        return parse_data({"type": spec.factory, **spec.options, **spec.reading_options, **wanted})
    return parse_data(wanted)


def _eval_source(data: Any, shard: BatchShard, reading_options: dict[str, Any]) -> Source:
    source = make_source(data, shard, reading_options)
    if isinstance(source, StreamSource) and source.passes.is_one_pass:
        raise ValueError(f"data.validation: {source.passes.name} {ONE_PASS}, because every evaluation reads it anew")
    return source


def _check_own_place(train: Source, validation: Source | None) -> None:
    if not isinstance(train, StreamSource) or not isinstance(validation, StreamSource):
        return
    stateful = train.passes.stateful
    if stateful is not None and stateful is validation.passes.stateful:
        raise ValueError(
            f"data.validation and the training data are one {train.passes.name}, which keeps one place by its "
            f"state_dict: each evaluation would move training elsewhere; give data.validation an object of its own"
        )


def _check_vocabulary(data: Any, vocab_size: int | None) -> None:
    largest = getattr(data, "vocab_size", None)
    if vocab_size is not None and isinstance(largest, int) and largest > vocab_size:
        raise ValueError(
            f"the data has token ids up to {largest - 1} (a vocabulary of {largest}), but model.vocab_size = "
            f"{vocab_size}: set model.vocab_size to {largest} or more"
        )


def _check_same_tokens(train: DatasetTokenizer | None, validation: Any) -> None:
    if train is None or not isinstance(validation, DatasetTokenizer):
        return
    if (train.name, train.content) != (validation.name, validation.content):
        raise ValueError(
            f"data.validation: its ids are of {validation.path or validation.name}, those of the training data of "
            f"{train.path or train.name}, and mean other tokens to the model; give both the same tokenizer (data"
            f".tokenizer, data.validation.tokenizer)"
        )


def _told_tokenizer(data: Any) -> tuple[DatasetTokenizer | None, str | None]:
    """What data says of its ids, or why that is nothing to be recorded. A user's own dataset may have an attribute
    ``tokenizer``: "bytes", or the path of a tokenizer.json or of a folder with one. It may have a name of another kind
    there ("gpt2" of the Hub), and an object is its own affair."""
    told = getattr(data, "tokenizer", None)
    if isinstance(told, DatasetTokenizer):
        return told, None
    if not isinstance(told, str | os.PathLike):
        return None, None
    try:
        return dataset_tokenizer(told, f"the attribute of {type(data).__name__}"), None
    except ValueError as error:
        if Path(told).name == TOKENIZER_FILE:
            raise
        return None, str(error)


def _describe(data: Any) -> str:
    if callable(getattr(data, "describe", None)):
        return str(data.describe())
    name = type(data).__name__
    try:
        return f"{name} of length {len(data):,}"
    except TypeError:
        return name
