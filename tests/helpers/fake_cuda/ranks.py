"""Forked ranks of a pretended CUDA machine."""

from __future__ import annotations

import faulthandler
import itertools
import os
import pickle
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from helpers.fake_cuda.pretend import DEVICE, pretend
from helpers.fake_cuda.waits import WatchedFakeTensors
from torch import Tensor
from torch import distributed as dist
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed import fake_pg  # noqa: F401  registers the backend
from torch.utils._python_dispatch import _disable_current_modes

from colossus.comm.links import Links
from colossus.construct import allocate
from colossus.construct.allocate import trace_constructor
from colossus.context import parallel_context
from colossus.context.groups import AxisGroup
from colossus.context.local_ranks import RanksFailed, run_local_ranks
from colossus.layers import deferred_wgrad

#: how long a rank waits for an object of another one, which may have failed
PATIENCE = timedelta(seconds=60)

torch.set_num_threads(1)


def _real_mesh(*args: Any, **options: Any) -> DeviceMesh:
    """A mesh is arithmetic on a tensor of ranks, whose values are needed."""
    with _disable_current_modes():
        return init_device_mesh(*args, **options)


def _real_trace(*args: Any) -> Any:
    """A constructor is recorded on the meta device; a fake tensor there keeps its device in an attribute, which
    parameters take over."""
    with _disable_current_modes():
        return trace_constructor(*args)


def _travel_by_store(store: dist.Store) -> None:
    """Objects between the stages of a pipeline go through the store; in a collective, other ranks have this one's."""
    numbers: defaultdict[str, Iterator[int]] = defaultdict(itertools.count)

    def key(group: AxisGroup, source: int, to: int) -> str:
        link = f"{group} from {group.ranks[source]} to {group.ranks[to]}"
        return f"object {next(numbers[link])} of {link}"

    def send(self: Links, to: int, value: Any, label: str) -> None:
        store.set(key(self._group, self._group.index, to), pickle.dumps(value).hex())

    def receive(self: Links, source: int, label: str) -> Any:
        return pickle.loads(bytes.fromhex(store.get(key(self._group, source, self._group.index)).decode()))

    def gather(value: Any, out: list[Any] | None, dst: int, group: Any) -> None:
        if out is not None:
            out[:] = [value] * len(out)

    Links.send_object, Links.receive_object = send, receive  # type: ignore[method-assign]
    dist.gather_object = gather  # type: ignore[assignment]
    dist.all_gather_object = dist.broadcast_object_list = lambda *args, **options: None  # type: ignore[assignment]


def run_fake_ranks(world: int, body: Callable[..., Any], *args: Any, ranks: Sequence[int] = (0,)) -> list[Any]:
    """``body(rank, *args)`` on some ranks of a world, each in a process of its own; their results, in this order.

    The others are not there: collectives end at once and leave any values. Objects that one stage of a pipeline sends
    to another do arrive, so all ranks of a pipeline have to be among ``ranks``.
    """
    with tempfile.TemporaryDirectory() as folder:

        def run(index: int) -> Any:
            rank = ranks[index]
            faulthandler.disable()  # what aborts on a device's thread is told in words
            if dist.is_initialized():
                dist.destroy_process_group()
            pretend()
            os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK="0")
            store = dist.FileStore(str(Path(folder) / "store"), world)
            store.set_timeout(PATIENCE)
            dist.init_process_group("fake", store=store, rank=rank, world_size=world)
            _travel_by_store(store)
            parallel_context.init_device_mesh = _real_mesh  # type: ignore[attr-defined]
            allocate.trace_constructor = _real_trace
            deferred_wgrad.PLAIN = (FakeTensor,)  # plain is what is of no type of ours
            with WatchedFakeTensors(Path(folder) / f"in backward of rank {rank}"):
                return body(rank, *args)

        try:
            return run_local_ranks(len(ranks), run)
        except RanksFailed as failed:
            for file in Path(folder).glob("in backward*"):
                failed.add_note(f"{file.name}: {file.read_text()}")
            raise


def batch_on_device(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The batch as a loader would give it. To be called by a rank."""
    return {key: value.to(DEVICE) for key, value in batch.items()}
