"""The loaders of a data rank, from the section ``data`` of a config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils.data import IterableDataset

from colossus.config import Config, model_options
from colossus.config.batch_sizes import BatchRamp
from colossus.config.schema import ReadingOptions
from colossus.config.section import Named
from colossus.data.batch_stream import BatchStream
from colossus.data.documents.kinds import call_with_options, parameters_of
from colossus.data.loader import Loader, Loaders, ValidationLoader
from colossus.data.sampler import BatchShard, local_batch_size
from colossus.data.sources import MapSource, Source
from colossus.data.streams import SampleStream, StreamSource
from colossus.data.token_budget import TokenBudget, budget_of
from colossus.data.tokenizer import require_same_tokens, tokenizer_of
from colossus.data.tokens import TooLittleData
from colossus.random import check_seed
from colossus.registry import DATASETS

#: value of `DataSpec.validation` if the config does not set it
_UNSET = object()


@dataclass(frozen=True)
class DataSpec:
    """The section ``data`` of a config, ``dict(type=..., **options)``, in its parts.

    Attributes:
        kind: the callable that makes the data, or the data itself.
        options: arguments of ``kind``.
        reading_options: values of `ReadingOptions`.
        validation: value of ``data.validation``.
    """

    kind: Any
    options: dict[str, Any]
    reading_options: dict[str, Any]
    validation: Any

    @property
    def name(self) -> str:
        return getattr(self.kind, "__name__", type(self.kind).__name__)

    @property
    def is_data(self) -> bool:
        """Return whether ``kind`` is the data itself."""
        return _is_data(self.kind)

    @property
    def takes_split(self) -> bool:
        """Return whether ``kind`` makes the validation data, too."""
        return not self.is_data and "split" not in self.options and "split" in parameters_of(self.kind)

    def build(self, defaults: Mapping[str, Any]) -> Any:
        """Return the data itself.

        Args:
            defaults: arguments for ``kind``: it receives those that it has, are not None, and are not in the config.

        Raises:
            ValueError: if ``kind`` does not have an option, or lacks one that it needs.
        """
        if self.is_data:
            return self.kind
        return call_with_options(self.kind, self.options, defaults, "data", DATASETS)


def parse_data(data: Any) -> DataSpec:
    """Return the parts of a section ``data``: a registered name, ``dict(type=...)``, a callable or the data itself."""
    if data is None:
        raise ValueError("no data: set data = dict(type='PythonStdlib'), or pass a dataset or a DataLoader")
    if isinstance(data, Named):
        data = {"type": data.type, **data.options}
    options = dict(data) if isinstance(data, Mapping) else {"type": data}
    kind = options.pop("type", None)
    if kind is None:
        raise ValueError(f"data needs a 'type': dict(type=..., **options); known: {', '.join(DATASETS.names())}")
    reading_options = {key: options.pop(key) for key in ReadingOptions.model_fields if key in options}
    validation = options.pop("validation", _UNSET)
    spec = DataSpec(DATASETS.get(kind) if isinstance(kind, str) else kind, options, reading_options, validation)
    if spec.is_data and options:
        raise ValueError(f"data: {spec.name} is made already and takes no option {', '.join(options)}")
    if not spec.is_data and not callable(spec.kind):
        raise ValueError(
            f"data is a {spec.name}, which is neither dict(type=..., **options), nor a dataset (__getitem__ and "
            f"__len__), an IterableDataset, a DataLoader, an iterable of batches or a callable that returns one"
        )
    return spec


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
    batch_ramp: BatchRamp | None = None,
    batch_dims: Mapping[str, int | None] | None = None,
    budget: TokenBudget | None = None,
) -> Loaders:
    """Return the loaders for a section ``data`` of a config.

    Args:
        data: one of

            * ``dict(type=name or callable, **options)`` or a name of `colossus.registry.DATASETS`;
            * a map-style dataset (``__getitem__`` and ``__len__``; lists too), read in the order of `SampleOrder`;
            * an IterableDataset: every rank must see the same stream; each data rank keeps its shard of each batch;
            * a DataLoader, or any iterable of ready batches. Its batches have ``global_batch_size`` samples (each data
              rank takes its slice), or that over ``data_size`` with a DistributedSampler or ``per_rank=True``;
            * a callable that returns one of these. It receives those of the arguments below that it has, and ``split``;
              with ``split`` it is called for ``"train"`` and for ``"validation"``.

            The dict may also have `ReadingOptions`, and ``validation``: None or False for none, a dict of options that
            replace those for training, or data of any kind above.
        eval_batch_size: samples of a validation batch over all data ranks; by default ``global_batch_size``.
        batch_ramp: ramp of training batches that grow to ``global_batch_size``.
        batch_dims: ``train.batch_dims``.
        budget: the budget of ``train.tokens_per_microbatch``, for training and validation.

    Raises:
        ValueError: if sizes do not divide, names or options are unknown, or data cannot be read as stated.
    """
    check_seed(seed)
    local_batch_size(global_batch_size, data_size)
    eval_size = global_batch_size if eval_batch_size is None else eval_batch_size
    local_batch_size(eval_size, data_size, "train.eval_batch_size")
    device = torch.device(device)
    defaults: dict[str, Any] = dict(
        seed=seed, global_batch_size=global_batch_size, data_rank=data_rank, data_size=data_size, seq_len=seq_len,
        vocab_size=vocab_size, pairs=pairs,
    )  # fmt: skip
    spec = parse_data(data)
    if pairs is not None and (own := spec.options.get("pairs", pairs)) != pairs:
        raise ValueError(f"data.pairs = {own}, but model.pairs = {pairs}: remove data.pairs")
    dims = batch_dims or {}
    train_shard = BatchShard(seed, global_batch_size, data_rank, data_size, True, batch_ramp, dims, budget=budget)
    train_data = spec.build({**defaults, "split": "train"} if spec.takes_split else defaults)
    _check_vocabulary(train_data, vocab_size)
    train = Loader(_make_source(train_data, train_shard, spec.reading_options), device=device)
    if batch_ramp is not None and not isinstance(train.source, MapSource):
        raise ValueError(
            f"train.batch_ramp is for a dataset whose samples are read by number (__getitem__ and __len__), but "
            f"{type(train_data).__name__} yields batches, or samples, one after the other"
        )
    if isinstance(train.source, MapSource) and train.source.num_samples < global_batch_size:
        raise ValueError(
            f"{type(train_data).__name__} has {train.source.num_samples} samples, fewer than train.global_batch_size = "
            f"{global_batch_size}: use more data, or set train.global_batch_size to {train.source.num_samples} or less"
        )

    eval_budget = None if budget is None else replace(budget, least=1)
    eval_shard = BatchShard(seed, eval_size, data_rank, data_size, endless=False, batch_dims=dims, budget=eval_budget)
    source, eval_data, missing = _validation(spec, {**defaults, "split": "validation"}, eval_shard)
    _check_vocabulary(eval_data, vocab_size)
    if eval_data is train_data and isinstance(source, StreamSource) and source.stateful is not None:
        raise ValueError(
            f"data.validation and the training data are one {type(train_data).__name__}, whose state_dict has a single "
            f"position; use another object for data.validation"
        )
    tokenizer = tokenizer_of(train_data)
    require_same_tokens(tokenizer, getattr(eval_data, "tokenizer", None), "data.validation")
    description = f"train: {_describe(train_data)}; validation: {missing or _describe(eval_data)}"
    validation = None if source is None else ValidationLoader(source, device=device)
    return Loaders(train, validation, description, missing if source is None else None, tokenizer)


def loaders_of(config: Config, data: Any, *, data_rank: int, data_size: int, device: torch.device | str) -> Loaders:
    """Return the loaders for a data rank of a config's run.

    Args:
        config: config of the run.
        data: the config's own data, or data that replaces it.
        data_rank: index of the data rank.
        data_size: number of data ranks.
        device: device of the batches.

    Raises:
        ValueError: see `build_loaders`; or the loss takes pairs, and the data has none.
    """
    options, train = model_options(config), config.train
    is_ours = isinstance(data, Named) and isinstance(data.type, str) and data.type in DATASETS._builtin
    # none of ours has pairs by itself
    if is_ours and getattr(options, "counted", "") == "pairs" and data.options.get("collate_fn") is None:
        raise ValueError(
            f"model.objective compares the two texts of a pair, but rows of {data.type} are single texts: take a "
            f"dataset with samples [2, tokens], and data.collate_fn = colossus.data.collate_pairs"
        )
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
        batch_ramp=train.batch_ramp,
        batch_dims=train.batch_dims,
        budget=budget_of(config),
    )


def _validation(spec: DataSpec, defaults: dict[str, Any], shard: BatchShard) -> tuple[Source | None, Any, str | None]:
    """Return source and data for validation, or the reason why there are none.

    Held-out data that the config does not name may be too small; then there is none. Data that it names must be large
    enough.
    """
    wanted, chosen = spec.validation, spec
    if wanted is None or wanted is False:
        return None, None, "none (data.validation is off)"
    if wanted is not _UNSET:
        if isinstance(wanted, dict) and "type" not in wanted:  # the training data's type, with these options
            if spec.is_data:
                raise ValueError("data.validation needs a 'type': the training data was made by the config itself")
            wanted = {"type": spec.kind, **spec.options, **spec.reading_options, **wanted}
        chosen = parse_data(wanted)
    elif not spec.takes_split:
        return None, None, "none (set data.validation, or use a type that takes split='validation')"
    try:
        data = chosen.build(defaults if chosen.takes_split else {**defaults, "split": None})
    except TooLittleData as error:
        if spec.validation is not _UNSET:
            raise
        return None, None, f"none ({error})"
    return _make_source(data, shard, chosen.reading_options), data, None


def _check_vocabulary(data: Any, vocab_size: int | None) -> None:
    largest = getattr(data, "vocab_size", None)
    if vocab_size is not None and isinstance(largest, int) and largest > vocab_size:
        raise ValueError(
            f"the data has token ids up to {largest - 1} (a vocabulary of {largest}), but model.vocab_size = "
            f"{vocab_size}: set model.vocab_size to {largest} or more"
        )


def _describe(data: Any) -> str:
    return str(data.describe()) if callable(getattr(data, "describe", None)) else type(data).__name__


def _make_source(data: Any, shard: BatchShard, reading_options: Mapping[str, Any]) -> Source:
    """Return the source for an object of this kind."""
    name, options = type(data).__name__, ReadingOptions(**reading_options)
    if isinstance(data, IterableDataset):
        if options.num_workers:
            raise ValueError(
                f"data.num_workers = {options.num_workers}, but {name} is an IterableDataset, and each worker would "
                f"read all of it; use a DataLoader of your own around it with num_workers=1, or with more around a "
                f"dataset that divides its samples by torch.utils.data.get_worker_info()"
            )
        return SampleStream(data, shard, options)
    if shard.budget is not None and not _is_map_style(data):
        raise ValueError(
            f"train.tokens_per_microbatch is for a dataset whose samples are read by number (__getitem__ and __len__) "
            f"and which says their lengths, but {name} yields batches, or samples, one after the other"
        )
    if _is_map_style(data):
        if options.per_rank:
            raise ValueError(
                f"data.per_rank is for a DataLoader and other iterables; each data rank reads its own samples of "
                f"{name} by their numbers"
            )
        if not len(data):
            raise ValueError(f"{name} has no samples (its length is 0)")
        return MapSource(data, shard, options)
    if not hasattr(data, "__iter__"):
        raise ValueError(f"{name} is neither a dataset (__getitem__ and __len__) nor iterable")
    if options.collate_fn or options.num_workers:
        raise ValueError(
            f"data.collate_fn and data.num_workers are for a dataset, but {name} yields ready batches; set them where "
            f"the batches are made"
        )
    return BatchStream(data, shard, options)


def _is_map_style(data: Any) -> bool:
    return hasattr(data, "__getitem__") and hasattr(data, "__len__") and not isinstance(data, IterableDataset)


def _is_data(candidate: Any) -> bool:
    return not isinstance(candidate, type) and (_is_map_style(candidate) or hasattr(candidate, "__iter__"))
