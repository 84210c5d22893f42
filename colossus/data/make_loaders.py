"""From whatever a config holds under ``data`` to the loaders of a data rank."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import IterableDataset

from colossus.config import Config, model_options
from colossus.config.batch_sizes import BatchRamp
from colossus.config.schema import ReadingOptions
from colossus.config.section import Named
from colossus.data.batch_stream import BatchStream
from colossus.data.loader import Loader, Loaders, ValidationLoader
from colossus.data.sampler import BatchShard, local_batch_size
from colossus.data.sources import MapSource, Source
from colossus.data.streams import SampleStream, StreamSource
from colossus.data.tokenizer import require_same_tokens, tokenizer_of
from colossus.data.tokens import TooLittleData
from colossus.random import check_seed
from colossus.registry import DATASETS

_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


#: of `DataSpec.validation`: the config says nothing
_UNSET = object()


@dataclass(frozen=True)
class DataSpec:
    """What a config says about its data: ``dict(type=..., **options)`` taken apart.

    Attributes:
        kind: what makes the data, or the data itself.
        options: arguments of ``kind``.
        reading_options: how it is read, as of `ReadingOptions`.
        validation: what the config says about validation data.
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
        """Whether there is nothing to make."""
        return _is_data(self.kind)

    @property
    def takes_split(self) -> bool:
        """Whether ``kind`` makes the validation data too."""
        return not self.is_data and "split" not in self.options and "split" in _parameters(self.kind)

    def build(self, defaults: Mapping[str, Any]) -> Any:
        """The data itself.

        Args:
            defaults: arguments for ``kind``: it gets those that it names, are not None, and are not in the config.

        Raises:
            ValueError: an option that ``kind`` does not know, or one that it needs and lacks.
        """
        if self.is_data:
            return self.kind
        parameters = _parameters(self.kind)
        known = [name for name, parameter in parameters.items() if parameter.kind in _NAMED]
        open_ended = not parameters or len(known) < len(parameters)
        for option in () if open_ended else self.options.keys() - known:
            raise ValueError(f"data: {self.name} has no option {option!r}; it has {', '.join(known)}")
        given = {name: value for name, value in defaults.items() if name in known and value is not None} | self.options
        for name in known:
            if parameters[name].default is inspect.Parameter.empty and name not in given:
                raise ValueError(f"data: {self.name} needs {name!r}: set data.{name}")
        return self.kind(**given)


def parse_data(data: Any) -> DataSpec:
    """What a config holds under ``data``: a registered name, ``dict(type=...)``, a callable or the data itself."""
    if data is None:
        raise ValueError("no data: set data = dict(type='PythonStdlib'), or hand over a dataset or a DataLoader")
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
            f"__len__), an IterableDataset, a DataLoader, an iterable of batches or a callable that gives one"
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
) -> Loaders:
    """Loaders for whatever a config holds under ``data``.

    Args:
        data: one of

            * ``dict(type=name or callable, **options)`` or a name of `colossus.registry.DATASETS`;
            * a map-style dataset (``__getitem__`` and ``__len__``; lists too), read in the order of `SampleOrder`;
            * an IterableDataset: every rank must see the same stream; each data rank keeps its shard of each batch;
            * a DataLoader, or any iterable of ready batches: taken as it is. Its batches hold ``global_batch_size``
              samples (each data rank takes its slice), or that over ``data_size`` with a DistributedSampler or
              ``per_rank=True``;
            * a callable that gives one of these. It gets those of the arguments below, and ``split``, that
              it names; with ``split`` it is called for ``"train"`` and for ``"validation"``.

            In the dict also `ReadingOptions`; ``validation``: None or False for none, a dict of options in place of
            those for training, or data of any kind above.
        eval_batch_size: samples of a validation batch over all data ranks, ``global_batch_size`` when not given.
        batch_ramp: of training batches that grow to ``global_batch_size``.
        batch_dims: ``train.batch_dims``.

    Raises:
        ValueError: sizes that do not divide, unknown names or options, data that cannot be read as stated.
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
    if pairs is not None and (given := spec.options.get("pairs", pairs)) != pairs:
        raise ValueError(f"data.pairs = {given}, but model.pairs = {pairs}: leave data.pairs out")
    dims = batch_dims or {}
    train_shard = BatchShard(seed, global_batch_size, data_rank, data_size, True, batch_ramp, dims)
    train_data = spec.build({**defaults, "split": "train"} if spec.takes_split else defaults)
    _check_vocabulary(train_data, vocab_size)
    train = Loader(_make_source(train_data, train_shard, spec.reading_options), device=device)
    if batch_ramp is not None and not isinstance(train.source, MapSource):
        raise ValueError(
            f"train.batch_ramp is for a dataset whose samples are read by number (__getitem__ and __len__), but "
            f"{type(train_data).__name__} gives batches, or samples, one after the other"
        )
    if isinstance(train.source, MapSource) and train.source.num_samples < global_batch_size:
        raise ValueError(
            f"{type(train_data).__name__} has {train.source.num_samples} samples, fewer than train.global_batch_size = "
            f"{global_batch_size}: give more data, or set train.global_batch_size to {train.source.num_samples} or less"
        )

    eval_shard = BatchShard(seed, eval_size, data_rank, data_size, endless=False, batch_dims=dims)
    source, eval_data, missing = _validation(spec, {**defaults, "split": "validation"}, eval_shard)
    _check_vocabulary(eval_data, vocab_size)
    if eval_data is train_data and isinstance(source, StreamSource) and source.stateful is not None:
        raise ValueError(
            f"data.validation and the training data are one {type(train_data).__name__}, which keeps one place by its "
            f"state_dict; give data.validation an object of its own"
        )
    tokenizer = tokenizer_of(train_data)
    require_same_tokens(tokenizer, getattr(eval_data, "tokenizer", None))
    description = f"train: {_describe(train_data)}; validation: {missing or _describe(eval_data)}"
    validation = None if source is None else ValidationLoader(source, device=device)
    return Loaders(train, validation, description, missing if source is None else None, tokenizer)


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
        batch_ramp=train.batch_ramp,
        batch_dims=train.batch_dims,
    )


def _validation(spec: DataSpec, defaults: dict[str, Any], shard: BatchShard) -> tuple[Source | None, Any, str | None]:
    """Source and data for validation, or the reason why there is none.

    Held-out data that the config did not ask for by name may turn out too small, then there is none;
    data that it names must do.
    """
    wanted, chosen = spec.validation, spec
    if wanted is None or wanted is False:
        return None, None, "none (data.validation says so)"
    if wanted is not _UNSET:
        if isinstance(wanted, dict) and "type" not in wanted:  # the training data's, with these options in their place
            if spec.is_data:
                raise ValueError("data.validation needs a 'type': the training data was made by the config itself")
            wanted = {"type": spec.kind, **spec.options, **spec.reading_options, **wanted}
        chosen = parse_data(wanted)
    elif not spec.takes_split:
        return None, None, "none (give data.validation, or a type that takes split='validation')"
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
    """The source that reads ``data``: chosen by the kind of object it is."""
    name, options = type(data).__name__, ReadingOptions(**reading_options)
    if isinstance(data, IterableDataset):
        if options.num_workers:
            raise ValueError(
                f"data.num_workers = {options.num_workers}, but {name} is an IterableDataset, of which each worker "
                f"would read the whole; give a DataLoader of your own around it, num_workers=1, or more around a "
                f"dataset that shares its samples out by torch.utils.data.get_worker_info()"
            )
        return SampleStream(data, shard, options)
    if _is_map_style(data):
        if options.per_rank:
            raise ValueError(
                f"data.per_rank is for a DataLoader and other data read from the front; each data rank has its own "
                f"samples of {name}, which is read by number"
            )
        if not len(data):
            raise ValueError(f"{name} has no samples (its length is 0)")
        return MapSource(data, shard, options)
    if not hasattr(data, "__iter__"):
        raise ValueError(f"{name} is neither a dataset (__getitem__ and __len__) nor iterable")
    if options.collate_fn or options.num_workers:
        raise ValueError(
            f"data.collate_fn and data.num_workers are for a dataset, but {name} gives ready batches; set them where "
            f"the batches are made"
        )
    return BatchStream(data, shard, options)


def _is_map_style(data: Any) -> bool:
    return hasattr(data, "__getitem__") and hasattr(data, "__len__") and not isinstance(data, IterableDataset)


def _is_data(candidate: Any) -> bool:
    return not isinstance(candidate, type) and (_is_map_style(candidate) or hasattr(candidate, "__iter__"))


def _parameters(factory: Any) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(factory).parameters
    except (TypeError, ValueError):  # some built-ins have no signature
        return {}
