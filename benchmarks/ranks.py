"""Groups of forked ranks that stay alive, one thread each, and do what they are told through a pipe.

While one group works the others wait in a read: they hold their memory and use no processor time.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any

import torch
from torch import distributed as dist

# before the first operation: a parent that has run threads leaves forked children without them, and they hang
torch.set_num_threads(1)

_fork = multiprocessing.get_context("fork")


class RankGroup:
    """``world`` processes with a gloo process group of their own (none for one rank), each with one object.

    Args:
        make: rank -> the object, built in the child after the process group.
        timeout: seconds that a call may take.
    """

    def __init__(self, name: str, world: int, make: Callable[[int], Any], timeout: float = 300.0) -> None:
        self.name, self.world, self.timeout = name, world, timeout
        self._folder = tempfile.TemporaryDirectory(prefix="benchmark")
        self._pipes: list[Connection] = []
        self._processes = []
        store = os.path.join(self._folder.name, "store")
        for rank in range(world):
            here, there = _fork.Pipe()
            process = _fork.Process(target=_serve, args=(there, rank, world, store, make), daemon=True)
            process.start()
            there.close()
            self._pipes.append(here)
            self._processes.append(process)
        try:
            self._collect()
        except BaseException:
            self.close()
            raise

    def call(self, method: str, *args: Any) -> list[Any]:
        """``getattr(object, method)(*args)`` on every rank at once; the results by rank.

        Raises:
            RuntimeError: with the traceback of the ranks that failed, or when they take too long.
        """
        for pipe in self._pipes:
            pipe.send((method, args))
        return self._collect()

    def _collect(self) -> list[Any]:
        results, errors = [], []
        for rank, pipe in enumerate(self._pipes):
            try:
                if not pipe.poll(self.timeout):
                    raise RuntimeError(f"{self.name}: rank {rank} did not answer within {self.timeout:.0f} s")
                done, value = pipe.recv()
            except EOFError:
                done, value = False, "died without a word"
            results.append(value)
            if not done:
                errors.append(f"{self.name}: rank {rank} failed\n{value}")
        if errors:
            raise RuntimeError("\n".join(errors))
        return results

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._folder.cleanup()

    def __enter__(self) -> RankGroup:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _serve(pipe: Connection, rank: int, world: int, store: str, make: Callable[[int], Any]) -> None:
    try:
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
        if world > 1:
            dist.init_process_group("gloo", rank=rank, world_size=world, store=dist.FileStore(store, world))
        held = make(rank)
        pipe.send((True, None))
        while True:
            method, args = pipe.recv()
            pipe.send((True, getattr(held, method)(*args)))
    except EOFError:  # the parent has gone
        pass
    except BaseException:
        pipe.send((False, traceback.format_exc()))
    finally:
        os._exit(0)
