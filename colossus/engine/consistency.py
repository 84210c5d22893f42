"""What all ranks must agree on: settings and code, the values a run starts from, and the batch of each step.

Ranks that disagree in silence would train different models, or one that nobody asked for. Every rank computes hashes of
its own, one gather compares them, and only where they differ is more sent, to name what differs.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import colossus
from colossus.arithmetic import named_ranks
from colossus.comm.objects import all_gather_object
from colossus.config import Config, ConfigError
from colossus.config.resolved import as_dict
from colossus.context.groups import AxisGroup
from colossus.context.parallel_context import ParallelContext
from colossus.gradients.host_transfer import LateValue
from colossus.layout.parameter import spec_of
from colossus.nest import tensors
from colossus.random import hash_key

#: differences that a message lists
_MOST = 8
#: tensors of more bytes are hashed by sums of so many columns
_SMALL_BYTES, _COLUMNS = 1 << 16, 1021
#: values of each tensor of a batch that are looked at
_SAMPLES = 256
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

# -- settings and code ------------------------------------------------------------------------------------


def require_same_settings(config: Config, functions: Mapping[str, Callable[..., Any] | None], group: AxisGroup) -> None:
    """That all ranks have the same resolved config, and the same code to run it with.

    Args:
        functions: name -> what was passed to `colossus.initialize` from the user's own files.

    Raises:
        ConfigError: on all ranks, with each key that differs, its values, and the ranks that have them.
    """
    settings = dict(_flat(as_dict(config), ""))
    settings["version of colossus"] = colossus.__version__
    settings["source of colossus"] = _hash_of_files(Path(colossus.__file__).parent)
    settings["version of torch"] = torch.__version__
    settings |= {f"source file of {name}": _hash_of_source(function) for name, function in functions.items()}
    digest = hashlib.blake2b(json.dumps(settings, sort_keys=True, default=str).encode(), digest_size=16).digest()
    if len(set(all_gather_object(digest, group))) == 1:
        return
    by_rank = all_gather_object(settings, group)
    keys = [key for key in dict.fromkeys(key for one in by_rank for key in one) if differs(key, by_rank)]
    problems = [f"{key}: {_values(key, by_rank)}" for key in keys[:_MOST]]
    if len(keys) > _MOST:
        problems.append(f"and {len(keys) - _MOST} more keys")
    raise ConfigError(
        [
            "the ranks of this run were started with different settings: give all of them the same config, overrides "
            "and code",
            *problems,
        ]
    )


def differs(key: str, by_rank: Iterable[Mapping[str, Any]]) -> bool:
    return len({repr(one.get(key)) for one in by_rank}) > 1


def _values(key: str, by_rank: list[dict[str, Any]]) -> str:
    """``3 on rank 0; 4 on ranks 1, 2``, the value that most ranks have first."""
    ranks: dict[str, list[int]] = {}
    for rank, one in enumerate(by_rank):
        ranks.setdefault(repr(one[key]) if key in one else "absent", []).append(rank)
    most_first = sorted(ranks.items(), key=lambda item: (-len(item[1]), item[1]))
    return "; ".join(f"{value} on {named_ranks(found)}" for value, found in most_first)


def _flat(value: Any, key: str) -> Iterable[tuple[str, Any]]:
    if not isinstance(value, dict) or not value:
        yield key, value
        return
    for name, item in value.items():
        yield from _flat(item, f"{key}.{name}" if key else name)


@functools.cache
def _hash_of_files(folder: Path) -> str:
    found = hashlib.blake2b(digest_size=8)
    for path in sorted(folder.rglob("*.py")):
        found.update(str(path.relative_to(folder)).encode() + b"\0" + path.read_bytes())
    return found.hexdigest()


def _hash_of_source(function: Any) -> str | None:
    """Of the file that a function or class was written in; None where there is none (a notebook, an instance)."""
    while isinstance(function, functools.partial):
        function = function.func
    try:
        return hashlib.blake2b(Path(inspect.getfile(function)).read_bytes(), digest_size=8).hexdigest()
    except (TypeError, OSError):
        return None


# -- the values a run starts from -------------------------------------------------------------------------
# What is drawn while a model is built is the same by its keys. What was there before (a module made outside of the
# factory), and what a constructor computes from things that differ between processes, is not.


def hashes_of_existing(model: nn.Module) -> dict[str, str]:
    """Name -> hash of the parameters and buffers that have values already while their model is still on meta."""
    held = (*model.named_parameters(), *model.named_buffers())
    return {name: hash_of(tensor) for name, tensor in held if not tensor.is_meta}


def require_same_values(model: nn.Module, existing: dict[str, str], context: ParallelContext) -> None:
    """That what existed before the build is equal on all ranks, and plain parameters on all that hold the same stage.

    One small gather; names are sent only where values differ.

    Args:
        existing: of the whole model, from `hashes_of_existing`.

    Raises:
        ValueError: on all ranks, with the names of the tensors that differ.
    """
    if context.world_size == 1:
        return
    plain = {
        name: hash_of(param)
        for name, param in model.named_parameters()
        if (spec := spec_of(param)).is_plain and not spec.layout.stored  # else ranks hold different rows
    }
    world, stage = context.group(context.grid.names), context.index("pipeline")
    summaries = all_gather_object((stage, _summary(existing), _summary(plain)), world)
    if len({of_existing for _, of_existing, _ in summaries}) > 1:
        names, ranks = _differing(all_gather_object(existing, world))
        raise ValueError(
            f"{names} existed before the model was built, with other values on {ranks} than on rank 0. Tensors made "
            f"outside of the factory are taken as they are, and ranks would train different models: build the whole "
            f"model inside (model=Net, or model=lambda: Net(...)), where values depend on train.seed alone; or make "
            f"them equal on every rank (load one checkpoint, or seed what draws them)"
        )
    of_stages = [{summary for at, _, summary in summaries if at == s} for s in range(context.size("pipeline"))]
    wrong = next((s for s, found in enumerate(of_stages) if len(found) > 1), None)
    if wrong is not None:
        gathered = all_gather_object((stage, plain), world)
        members = [rank for rank, (at, _) in enumerate(gathered) if at == wrong]
        names, ranks = _differing([gathered[rank][1] for rank in members], members)
        raise ValueError(
            f"{names} would start with other values on {ranks} than on rank {members[0]}, and ranks would train "
            f"different models: the constructor uses something that differs between processes (a tensor made outside, "
            f"a generator without a seed, the rank, the time). Let values depend on torch's generators and the config "
            f"alone"
        )


def _summary(hashes: dict[str, str]) -> str:
    return hashlib.blake2b(repr(sorted(hashes.items())).encode(), digest_size=16).hexdigest()


def _differing(by_rank: list[dict[str, str]], ranks: list[int] | None = None) -> tuple[str, str]:
    """The names of the tensors that differ, and the ranks that do not have the first one's values, in words."""
    numbers = list(range(len(by_rank))) if ranks is None else ranks
    names = [name for name in dict.fromkeys(name for one in by_rank for name in one) if differs(name, by_rank)]
    others = [rank for rank, one in zip(numbers, by_rank, strict=True) if one != by_rank[0]]
    more = f" and {len(names) - _MOST} more" if len(names) > _MOST else ""
    return ", ".join(names[:_MOST]) + more, named_ranks(others)


def hash_of(tensor: Tensor) -> str:
    """Of all values, shape and type; of tensors that are no plain arrays of the latter two.

    Of large ones sums of columns are hashed, at the speed of memory.
    """
    found = hashlib.blake2b(f"{tensor.dtype} {tuple(tensor.shape)}".encode(), digest_size=16)
    if tensor.layout is not torch.strided or tensor.is_quantized or type(tensor.data) is not Tensor:
        return found.hexdigest()
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
    if flat.numel() > _SMALL_BYTES:
        whole = flat.numel() // (8 * _COLUMNS) * (8 * _COLUMNS)
        # a view as integers of eight bytes wants an address that they divide
        table = flat[:whole] if flat.data_ptr() % 8 == 0 else flat[:whole].clone()
        sums = table.view(torch.int64).view(-1, _COLUMNS).sum(0)
        flat = torch.cat((sums.view(torch.uint8), flat[whole:]))
    found.update(flat.cpu().numpy().tobytes())
    return found.hexdigest()


# -- the batch of each step -------------------------------------------------------------------------------
# Tensor, sequence and pipeline ranks share a batch. A loop that gives each process its own (a `DistributedSampler` over
# the world) would train on in silence: shapes fit, loss and norm are finite and the same on all ranks.


class BatchCheck:
    """Adds a mark of the batch to the step's all-reduce, and tells what its total means.

    With h a hash of the batch and n ranks that share it, the first of them adds (n - 1) h and the others -h, so that
    the total is 0 when they agree. The hash is of the replica's number too, so that errors of two replicas do not
    cancel. The numbers are integers that float64 holds exactly in any order of summation.

    Args:
        group: all ranks that share a batch, and maybe other replicas: that of the step's all-reduce.
    """

    def __init__(self, context: ParallelContext, group: AxisGroup) -> None:
        self._context, self._group = context, group
        self._num_sharing = context.world_size // context.size("data")
        shared = tuple(axis for axis in context.grid.names if axis not in context.grid.axes("data"))
        self._is_first = context.index(shared) == 0
        self._mask = (1 << min(40, 52 - context.world_size.bit_length())) - 1
        self._late_total = LateValue()

    @property
    def is_needed(self) -> bool:
        return self._num_sharing > 1

    def mark(self, batch: Any, of_cpu: int) -> Tensor:
        """What this rank adds to the total: float64 scalar. Never waits for an accelerator.

        Args:
            of_cpu: `fingerprint` of the batch; values of tensors on other devices are added there.
        """
        replica, device = self._context.index("data"), self._context.device
        value = torch.full((), hash_key("batch", replica, of_cpu), dtype=torch.int64, device=device)
        for _, values in _samples(batch):
            if values.device.type != "cpu":
                weights = _weights(replica, len(values), values.device)
                value = value * 31 + (values.to(torch.int64) * weights).sum().to(device)
        factor = self._num_sharing - 1 if self._is_first else -1
        return (value & self._mask).double() * factor

    def check(self, total: Tensor, own: Tensor) -> None:
        """Check the total of a step: at once where that costs nothing, on an accelerator with the next step.

        Args:
            own: what `mark` gave.

        Raises:
            ValueError: on all ranks, when ranks of one model were given different batches.
        """
        if total.device.type == "cpu":
            if total.item():
                factor = self._num_sharing - 1 if self._is_first else -1
                raise ValueError(self._refusal(all_gather_object(own.item() / factor, self._group)))
            return
        late = self._late_total.push(total)
        if late is not None:
            self.require_zero(late)

    def require_zero(self, total: float) -> None:
        """The same for a total that has been read.

        Raises:
            ValueError: see `check`.
        """
        if total:
            raise ValueError(self._refusal())

    def _refusal(self, hashes: list[float] | None = None) -> str:
        grid, data = self._context.grid, self._context.grid.axes("data")
        shared = tuple(axis for axis in grid.names if axis not in data and grid.sizes[axis] > 1)
        where = ""
        if hashes is not None:
            by_rank = dict(zip(self._group.ranks, hashes, strict=True))
            replicas = {tuple(grid.group(rank, shared)) for rank in self._group.ranks}
            wrong = sorted(ranks for ranks in replicas if len({by_rank[rank] for rank in ranks}) > 1)
            where = f" ({'; '.join('ranks ' + ', '.join(map(str, ranks)) for ranks in wrong[:4])})"
        sizes = " x ".join(f"{axis} {grid.sizes[axis]}" for axis in shared)
        return (
            f"ranks that share a batch were given different ones{where}: under this plan every {self._num_sharing} "
            f"ranks ({sizes}) work on the same samples, and only data ranks have samples of their own. Take batches "
            f"from engine.loader; a sampler of your own gets num_replicas=engine.context.size('data') and "
            f"rank=engine.context.index('data') instead of the world size and the rank, and augments with random "
            f"numbers that depend on these alone"
        )


def fingerprint(batch: Any) -> int:
    """A number that two different batches hardly share: of all shapes, and of some values of tensors on the CPU."""
    found = zlib.crc32(repr([tuple(x.shape) for _, x in tensors(batch)]).encode())
    for _, values in _samples(batch):
        if values.device.type == "cpu":
            found = zlib.crc32(values.numpy().tobytes(), found)
    return found


def _samples(batch: Any) -> Iterator[tuple[str, Tensor]]:
    """Some values of every tensor with its path, as integers with the same bits."""
    for path, x in tensors(batch):
        if x.layout is not torch.strided or x.is_quantized or x.is_meta or not x.numel():
            continue
        x = x.detach()
        if x.is_complex():
            x = torch.view_as_real(x.resolve_conj())
        yield path, torch.take(x.resolve_neg().view(_INTEGERS[x.element_size()]), _positions(x.numel(), x.device))


@functools.lru_cache(maxsize=256)
def _positions(numel: int, device: torch.device) -> Tensor:
    """Which elements are looked at: scattered, so that they are not all first tokens or corners of images."""
    if numel <= _SAMPLES:
        return torch.arange(numel, device=device)
    return torch.randint(numel, (_SAMPLES,), generator=torch.Generator().manual_seed(numel)).sort().values.to(device)


@functools.lru_cache(maxsize=256)
def _weights(replica: int, count: int, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(replica)
    return torch.randint(2**62, (count,), generator=generator).to(device) | 1
