"""From what a config says about its data to objects, and from objects to sources of batches."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, RandomSampler, SequentialSampler

from colossus.config.schema import READING_OPTIONS
from colossus.config.section import Named
from colossus.data.sources import BatchShard, MapSource, Source
from colossus.data.streams import BatchStream
from colossus.data.worker_stream import sample_stream
from colossus.registry import DATASETS, nearest

NAMED_PARAMETERS = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


@dataclass(frozen=True)
class DataSpec:
    """What a config says about its data: ``dict(type=..., **options)`` taken apart.

    Args:
        name: what messages call it.
        factory: what makes the data; None when the config holds the data itself.
        instance: the data itself, without a factory.
        options: arguments of ``factory``.
        reading_options: how it is read: ``num_workers``, ``collate_fn``, ``per_rank``, ``read_ahead``.
        validation: what the config says about validation data; `DataSpec.UNSET` when it says nothing.
    """

    UNSET = object()

    name: str
    factory: Any = None
    instance: Any = None
    options: dict[str, Any] = field(default_factory=dict)
    reading_options: dict[str, Any] = field(default_factory=dict)
    validation: Any = UNSET

    @property
    def takes_split(self) -> bool:
        """Whether the factory makes the validation data too."""
        return self.factory is not None and "split" not in self.options and "split" in _parameters(self.factory)

    def build(self, defaults: Mapping[str, Any]) -> Any:
        """The data itself.

        Args:
            defaults: arguments for the factory: it gets those that it names, are not None, and are not in the config.

        Raises:
            ValueError: an option the factory does not know (names the nearest), or one that it needs and lacks.
        """
        if self.factory is None:
            return self.instance
        parameters = _parameters(self.factory)
        open_ended = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
        known = [name for name, parameter in parameters.items() if parameter.kind in NAMED_PARAMETERS]
        for option in self.options:
            if option not in known and parameters and not open_ended:
                hint = nearest(option, known)
                raise ValueError(
                    f"data: {self.name} has no option {option!r}."
                    + (f" Did you mean {hint!r}?" if hint else "")
                    + f" Known: {', '.join([*known, *READING_OPTIONS, 'validation'])}."
                )
        given = {name: value for name, value in defaults.items() if name in known and value is not None} | self.options
        for name in known:
            if parameters[name].default is inspect.Parameter.empty and name not in given:
                raise ValueError(f"data: {self.name} needs {name!r}: set data.{name}")
        return self.factory(**given)


def parse_data(data: Any) -> DataSpec:
    """What a config holds under ``data``: a registered name, ``dict(type=...)``, a callable or the data itself."""
    if isinstance(data, Named):
        data = {"type": data.type, **data.options}
    if isinstance(data, str):
        data = {"type": data}
    if data is None:
        raise ValueError("no data: set data = dict(type='PythonStdlib'), or hand over a dataset or a DataLoader")
    if not isinstance(data, Mapping):
        if _is_data(data):
            return DataSpec(type(data).__name__, instance=data)
        if callable(data):
            return DataSpec(_name_of(data), factory=data)
        raise ValueError(
            f"data is a {type(data).__name__}, which is neither dict(type=..., **options), nor a dataset (__getitem__ "
            f"and __len__), an IterableDataset, a DataLoader, an iterable of batches or a callable that gives one"
        )
    options = dict(data)
    kind = options.pop("type", None)
    if kind is None:
        raise ValueError(f"data needs a 'type': dict(type=..., **options); known: {', '.join(DATASETS.names())}")
    is_instance = not isinstance(kind, str) and _is_data(kind)
    factory = None if is_instance else kind if callable(kind) else DATASETS.get(kind)
    # a factory with a parameter of such a name gets the option itself
    parameters = _parameters(factory) if factory is not None else {}
    reading_options = {key: options.pop(key) for key in READING_OPTIONS if key in options and key not in parameters}
    validation = DataSpec.UNSET if "validation" in parameters else options.pop("validation", DataSpec.UNSET)
    if is_instance:
        if options:
            raise ValueError(f"data: {type(kind).__name__} is made already and takes no option {', '.join(options)}")
        return DataSpec(type(kind).__name__, instance=kind, reading_options=reading_options, validation=validation)
    return DataSpec(_name_of(factory), factory, None, options, reading_options, validation)


def make_source(data: Any, shard: BatchShard, reading_options: Mapping[str, Any]) -> Source:
    """The source that reads ``data``: chosen by the kind of object it is.

    Raises:
        ValueError: an object that cannot be read, reading options that do not apply to it, or a DistributedSampler
            made for other ranks.
    """
    ahead = reading_options.get("read_ahead")
    if ahead is not None and not isinstance(ahead, bool):
        raise ValueError(f"data.read_ahead = {ahead!r} is neither True nor False")
    source = _source_of(data, shard, reading_options)
    source.read_ahead = ahead
    return source


def _source_of(data: Any, shard: BatchShard, reading_options: Mapping[str, Any]) -> Source:
    name = type(data).__name__
    workers = reading_options.get("num_workers", 0)
    if isinstance(workers, bool) or not isinstance(workers, int) or workers < 0:
        raise ValueError(f"data.num_workers = {workers!r} is not a number of processes (an integer >= 0)")
    collate_fn = reading_options.get("collate_fn")
    if collate_fn is not None and not callable(collate_fn):
        raise ValueError(f"data.collate_fn = {collate_fn!r} is not a function from a list of samples to a batch")
    if _gives_samples(data):
        if "per_rank" in reading_options:
            raise ValueError(f"data.per_rank is for a DataLoader or other ready batches, but {name} gives samples")
        if isinstance(data, IterableDataset):
            return sample_stream(data, shard, collate_fn=collate_fn, num_workers=workers)
        if not len(data):
            raise ValueError(f"{name} has no samples (its length is 0)")
        return MapSource(data, shard, collate_fn=collate_fn, num_workers=workers)
    for option in ("collate_fn", "num_workers"):
        if option in reading_options:
            raise ValueError(
                f"data.{option} is for a dataset, but {name} gives ready batches; set it where the batches are made"
            )
    if isinstance(data, DataLoader):
        return _loader_source(data, shard, reading_options.get("per_rank"))
    if hasattr(data, "__iter__"):
        return BatchStream(data, shard, per_rank=reading_options.get("per_rank"))
    raise ValueError(f"{name} is neither a dataset (__getitem__ and __len__) nor iterable")


def _loader_source(loader: DataLoader[Any], shard: BatchShard, per_rank: bool | None) -> Source:
    sampler = loader.sampler
    if loader.batch_sampler is not None:
        sampler = getattr(loader.batch_sampler, "sampler", sampler)
    size = getattr(loader.batch_sampler, "batch_size", None)
    if isinstance(sampler, DistributedSampler):
        _check_distributed(sampler, shard)
        per_rank = True if shard.data_size > 1 else per_rank
    elif per_rank is None and shard.data_size > 1 and size == shard.size and _knows_no_ranks(sampler):
        raise ValueError(
            f"the DataLoader gives batches of {size} and its {type(sampler).__name__} knows nothing of the "
            f"{shard.data_size} data ranks, so all of them would train on the same samples. Either batch_size="
            f"{shard.global_batch_size} (each data rank takes its {shard.size}), or DistributedSampler(dataset, "
            f"num_replicas={shard.data_size}, rank={shard.data_rank}), or, when its dataset differs between "
            f"data ranks, data = dict(type=lambda: loader, per_rank=True)"
        )
    elif per_rank is None and size == shard.global_batch_size:
        per_rank = False  # also where the first batch is the last one, and smaller
    dataset = loader.dataset
    # With workers the dataset that moves on is a copy in another process, so its state here means nothing.
    own_state = isinstance(dataset, IterableDataset) and not loader.num_workers and not hasattr(loader, "state_dict")
    return BatchStream(loader, shard, stateful=dataset if own_state else None, per_rank=per_rank)


def _knows_no_ranks(sampler: Any) -> bool:
    return isinstance(sampler, RandomSampler | SequentialSampler)


def _check_distributed(sampler: DistributedSampler[Any], shard: BatchShard) -> None:
    if (sampler.num_replicas, sampler.rank) != (shard.data_size, shard.data_rank):
        raise ValueError(
            f"the DataLoader's DistributedSampler has num_replicas={sampler.num_replicas}, rank={sampler.rank}, but "
            f"this process is data rank {shard.data_rank} of {shard.data_size}; ranks of one model must read the same "
            f"samples: DistributedSampler(dataset, num_replicas={shard.data_size}, rank={shard.data_rank}), or no "
            f"DistributedSampler and batch_size={shard.global_batch_size}"
        )


def _gives_samples(data: Any) -> bool:
    if isinstance(data, DataLoader):
        return False
    return isinstance(data, IterableDataset) or (hasattr(data, "__getitem__") and hasattr(data, "__len__"))


def _is_data(candidate: Any) -> bool:
    if isinstance(candidate, type):
        return False
    return _gives_samples(candidate) or isinstance(candidate, DataLoader) or hasattr(candidate, "__iter__")


def _name_of(factory: Any) -> str:
    return getattr(factory, "__name__", type(factory).__name__)


def _parameters(factory: Any) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(factory).parameters
    except (TypeError, ValueError):  # some built-ins have no signature
        return {}
