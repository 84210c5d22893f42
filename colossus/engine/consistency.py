"""Checks that all ranks agree: on settings, on the values a run starts from, and on the batch of each step.

Ranks that silently disagree would train different models, or one that nobody asked for. Small hashes are compared; only
if they differ are the values exchanged, to name the difference.
"""

from __future__ import annotations

import functools
import hashlib
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import colossus
from colossus.arithmetic import named_ranks
from colossus.comm.host_transfer import HostRead
from colossus.comm.late import Late
from colossus.comm.objects import all_gather_object
from colossus.config import Config, ConfigError
from colossus.config.printed import as_dict, by_path
from colossus.context.groups import AxisGroup
from colossus.context.parallel_context import ParallelContext
from colossus.context.program import RECENT, WHY
from colossus.layout.parameter import spec_of
from colossus.nest import tensors
from colossus.random import hash_key

#: differences that a message lists
_MOST = 8
#: values of each tensor in a fingerprint
_SAMPLES = 256
#: bytes of an element -> integer dtype of the same size
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def require_same_settings(config: Config, group: AxisGroup) -> None:
    """Raise ConfigError unless all ranks have the same resolved config and the same versions.

    It is raised on all ranks, and has each key that differs, its values, and the ranks that have them.
    """
    versions = {"version of colossus": colossus.__version__, "version of torch": torch.__version__}
    differing = _differences(dict(by_path(as_dict(config))) | versions, group)
    if differing:
        problems = [
            f"{key}: {'; '.join(f'{value} on {named_ranks(ranks)}' for value, ranks in values.items())}"
            for key, values in [*differing.items()][:_MOST]
        ]
        head = "the ranks of this run were started with different settings: start all of them with the same config"
        raise ConfigError([head, *problems])


def _differences(own: Mapping[str, Any], group: AxisGroup, stage: int = 0) -> dict[str, dict[str, list[int]]]:
    """Return name -> value -> the ranks that have it, of values that differ between ranks of a stage. Collective."""
    digest = hashlib.blake2b(repr(sorted(own.items())).encode(), digest_size=16).digest()
    digests = set(all_gather_object((stage, digest), group))
    stages = {stage for stage, _ in digests}
    if len(digests) == len(stages):
        return {}
    ranks_of: dict[tuple[int, str], dict[str, list[int]]] = {}
    by_rank = [*zip(group.ranks, all_gather_object((stage, own), group), strict=True)]
    for key in dict.fromkeys((stage, name) for _, (stage, values) in by_rank for name in values):
        for rank, (_, values) in filter(lambda entry: entry[1][0] == key[0], by_rank):
            value = repr(values[key[1]]) if key[1] in values else "absent"
            ranks_of.setdefault(key, {}).setdefault(value, []).append(rank)
    return {name: ranks for (_, name), ranks in ranks_of.items() if len(ranks) > 1}


def fingerprints_of_existing(model: nn.Module) -> dict[str, int]:
    """Return the `fingerprint` by name of tensors that have values although their model is still on meta."""
    named = (*model.named_parameters(), *model.named_buffers())
    return {name: fingerprint(tensor) for name, tensor in named if not tensor.is_meta}


def require_same_values(model: nn.Module, existing: Mapping[str, int], context: ParallelContext) -> None:
    """Raise ValueError unless a run starts from the same values on all ranks with the same stage of the model.

    Values that are drawn while a model is built are the same by their keys. Plain parameters, which a constructor may
    compute from anything, and tensors that existed before the build are compared.

    Args:
        model: the rank's part of the model.
        existing: fingerprints of tensors of the whole model, the same on all stages, from `fingerprints_of_existing`.
        context: the rank's context.

    Raises:
        ValueError: on all ranks, with the names of the tensors that differ.
    """
    plain = {
        name: fingerprint(param)
        for name, param in model.named_parameters()
        if (spec := spec_of(param)).is_plain and not spec.layout.stored  # else ranks store different rows
    }
    world = context.group(context.grid.names)
    differing = _differences(existing, world) | _differences(plain, world, context.index("pipeline"))
    if differing:
        first, *others = next(iter(differing.values())).values()
        differ = named_ranks(sorted(rank for ranks in others for rank in ranks))
        raise ValueError(
            f"{', '.join([*differing][:_MOST])} would start with other values on {differ} than on "
            f"{named_ranks(first)}: made outside of the model's factory, or from something that differs between "
            f"processes (a generator without a seed, the rank, the time). Build the whole model inside of the factory "
            f"(model=Net, or model=lambda: Net(...)), from torch's generators and the config alone"
        )


class ProgramCheck:
    """The comparison of the layers behind a group's collectives on all ranks, by a mark in the step's all-reduce.

    Ranks that choose between modules of one shape would silently get each other's weights, since messages between hosts
    and of NCCL have no header (on one host `comm.channel` compares each collective). As in `BatchCheck`, the first of
    the n ranks of a group adds (n - 1) h and the others -h, so that the total is 0 if all groups agree.

    Args:
        context: the rank's context.
        axes: axes over which a step's numbers are summed.
    """

    def __init__(self, context: ParallelContext, axes: Sequence[str]) -> None:
        self._context, self._axes = context, axes
        self._mask = (1 << min(36, 48 - context.world_size.bit_length())) - 1
        self._totals: Late[HostRead, None] = Late()

    def mark(self) -> float:
        """Return this rank's addend to the total."""
        total = 0
        for group in self._groups():
            digest = hash_key(group.ranks[0], str(group), group.program.digest, group.program.count) & self._mask
            total += digest * (group.size - 1 if group.index == 0 else -1)
        return float(total)

    def check(self, total: Tensor) -> None:
        """Check the total of a step: at once on the CPU, with the next step on an accelerator.

        Raises:
            RuntimeError: on all ranks, if the ranks of a group have run different programs.
        """
        if any(read.wait().item() for read, _ in self._totals.push(HostRead(total), None)):
            raise RuntimeError(f"{self._first_difference()}: {WHY}")

    def _first_difference(self) -> str:
        """Return the first difference of the programs. Collective over the ranks whose numbers are summed."""
        own: dict[tuple[int, str, int], dict[int, str]] = {}
        for group in self._groups():  # of two groups with the same ranks, one is of activations
            number = sum(key[:2] == (group.ranks[0], str(group)) for key in own)
            own[group.ranks[0], str(group), number] = group.program.names()
        step_group = self._context.group(self._axes)
        by_rank = [*zip(step_group.ranks, all_gather_object(own, step_group), strict=True)]
        for key in dict.fromkeys(key for _, programs in by_rank for key in programs):
            names_of = {rank: programs[key] for rank, programs in by_rank if key in programs}
            oldest = max(min(names) for names in names_of.values())
            for number in range(oldest, max(max(names) for names in names_of.values()) + 1):
                ranks_of: dict[str, list[int]] = {}
                for rank, names in names_of.items():
                    ranks_of.setdefault(names.get(number, "nothing more"), []).append(rank)
                if len(ranks_of) > 1:
                    ran = "; ".join(f"{named_ranks(ranks)} ran {name}" for name, ranks in ranks_of.items())
                    return f"over {key[1]} {ran}, one in place of the other"
        return f"the last {RECENT} collectives of weights are the same on all ranks, those before them are not"

    def _groups(self) -> list[AxisGroup]:
        return [group for group in self._context.groups_within(self._axes) if group.program.count]


class BatchCheck:
    """The check that ranks which share a batch received the same one, by a mark in the step's all-reduce.

    For example, a `DistributedSampler` over the world gives each process its own, which shapes, loss and norm do not
    reveal.

    With h a hash of the batch and n ranks that share it, the first of them adds (n - 1) h and the others -h, so that
    the total is 0 if they agree. The hash includes the replica's number, so that errors of two replicas do not cancel.
    The numbers are integers that float64 represents exactly in any order of summation.
    """

    def __init__(self, context: ParallelContext) -> None:
        self._context, grid = context, context.grid
        self._shared = tuple(axis for axis in grid.names if axis not in grid.axes("data"))
        self.num_sharing = context.size(self._shared)
        self._factor = self.num_sharing - 1 if context.index(self._shared) == 0 else -1
        self._mask = (1 << min(40, 52 - context.world_size.bit_length())) - 1
        self._totals: Late[HostRead, None] = Late()

    def mark(self, batch: Any, of_cpu: int) -> Tensor:
        """Return this rank's addend to the total, a float64 scalar. Never waits for an accelerator.

        Args:
            batch: the rank's batch.
            of_cpu: `fingerprint` of the batch, to which values of tensors on other devices are added here.
        """
        replica, device = self._context.index("data"), self._context.device
        value = torch.full((), of_cpu, dtype=torch.int64, device=device)
        for values in _samples(batch):
            if values.device.type != "cpu":
                weights = _random_integers(2**62, len(values), values.device)
                value = value * 31 + (values.to(torch.int64) * weights).sum().to(device)
        value = value * (hash_key("batch", replica) | 1) >> 8
        return (value & self._mask).double() * self._factor

    def check(self, total: Tensor) -> None:
        """Check the total of a step: at once on the CPU, with the next step on an accelerator.

        Raises:
            ValueError: on all ranks, if ranks of one model have different batches.
        """
        if any(read.wait().item() for read, _ in self._totals.push(HostRead(total), None)):
            sizes = self._context.grid.sizes
            axes = " x ".join(f"{axis} {sizes[axis]}" for axis in self._shared if sizes[axis] > 1)
            raise ValueError(
                f"ranks that share a batch have different ones: under this plan every {self.num_sharing} ranks "
                f"({axes}) work on the same samples. Take batches from engine.loader; a sampler of your own needs "
                f"num_replicas=engine.context.size('data') and rank=engine.context.index('data') instead of the world "
                f"size and the rank, and augments with random numbers that depend on these alone"
            )


def fingerprint(batch: Any) -> int:
    """Return a hash of a nest of tensors: of all shapes and dtypes, and of some values of each tensor on the CPU."""
    crc = zlib.crc32(repr([(tuple(x.shape), x.dtype) for _, x in tensors(batch)]).encode())
    for values in _samples(batch):
        if values.device.type == "cpu":
            crc = zlib.crc32(values.numpy().tobytes(), crc)
    return crc


def _samples(batch: Any) -> Iterator[Tensor]:
    """Yield some values of every tensor, as integers with the same bits."""
    for _, x in tensors(batch):
        if x.layout is not torch.strided or x.is_quantized or x.is_meta or not x.numel():
            continue
        x = x.detach()
        if x.is_complex():
            x = torch.view_as_real(x.resolve_conj())
        values = x.resolve_neg().view(INTEGERS[x.element_size()])
        # scattered, so that they are not all first tokens or corners of images
        large = x.numel() > _SAMPLES
        yield torch.take(values, _random_integers(x.numel(), _SAMPLES, x.device)) if large else values.flatten()


@functools.lru_cache(maxsize=256)
def _random_integers(below: int, count: int, device: torch.device) -> Tensor:
    """Return integers that are the same on all ranks; they are cached, so that no step waits for a copy."""
    return torch.randint(below, (count,), generator=torch.Generator().manual_seed(below)).to(device)
