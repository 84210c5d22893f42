"""A writer of checkpoints into the memory of the hosts: each host keeps the files of its ranks."""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from colossus import machine
from colossus.arithmetic import byte_count
from colossus.checkpoint import folder
from colossus.checkpoint.host_memory import HostMemory
from colossus.checkpoint.manifest import MANIFEST, About, merge
from colossus.checkpoint.part import written
from colossus.checkpoint.writer import CheckpointWriter, RankState, Save, problem_among
from colossus.comm.objects import all_gather_object, broadcast_object, gather_object
from colossus.config import ConfigError
from colossus.context.parallel_context import ParallelContext


class MemoryWriter(CheckpointWriter):
    """A writer of checkpoints into the memory of the hosts.

    Two generations stay. The oldest is removed when a third begins; by then the second is whole on all hosts.

    Args:
        memory: the folders of all hosts.
        context: this rank's context.
        copies: 2 if each host also fetches the files of the host before it, in the background; else 1.
        on_block: see `CheckpointWriter`.
    """

    def __init__(
        self, memory: HostMemory, context: ParallelContext, copies: int, on_block: Callable[[], None] = lambda: None
    ) -> None:
        super().__init__(memory.root, context, on_block=on_block, label="checkpoint in memory")
        self._memory, self._has_room = memory, False
        self._previous_host = (memory.host - 1) % memory.num_hosts if copies > 1 and memory.num_hosts > 1 else None

    def save(self, collect: Callable[[], RankState], about: About, *, background: bool = True) -> Save:
        """Start to save, see `CheckpointWriter.save`.

        Raises:
            ConfigError: on all ranks, before the first save, if two generations do not fit into a host's memory.
        """
        self.finish()
        if not self._has_room:
            self._require_room(collect)
            self._has_room = True
        return super().save(collect, about, background=background)

    def _require_room(self, collect: Callable[[], RankState]) -> None:
        def count() -> int:
            return sum(part.num_bytes for part in written(collect()[0]))

        written_bytes = all_gather_object(self._outcome(count), self._group)
        if problem_among(written_bytes) is not None:  # the save will say so
            return

        def num_bytes(host: int) -> int:
            return sum(int(written_bytes[rank]) for rank in self._memory.ranks_of(host))

        staged = num_bytes(self._memory.host)
        needed = 2 * (staged + (num_bytes(self._previous_host) if self._previous_host is not None else 0))
        used = sum(path.stat().st_size for path in self.root.glob("step-*/*"))
        system, (_, available) = os.statvfs(self.root), machine.memory_bytes()
        free = system.f_bavail * system.f_frsize
        room = used + (free if available is None else min(free, max(available - staged, 0)))
        problem = None
        if needed > room:
            owners = "its ranks and of the host before it" if self._previous_host is not None else "its ranks"
            problem = (
                f"checkpoint.memory_every: two generations of the state of {owners} need {byte_count(needed)}, and "
                f"host {platform.node()} has {byte_count(room)} left in {self.root.parent}, beside the copy that a "
                f"save makes first: remove this key, or use more hosts"
            )
        if problem := problem_among(all_gather_object(problem, self._group)):
            raise ConfigError(problem)

    def _prepare(self, target: Path) -> None:
        for old in sorted(folder.checkpoint_steps(self.root))[:-1]:
            # a rank's own file makes room for the one that it writes now, so it need not wait for other ranks
            (old / folder.file_of(self._group.index)).unlink(missing_ok=True)
            if self._memory.is_first:
                shutil.rmtree(old, ignore_errors=True)
        if self._memory.is_first:
            folder.remove_left_over(self.root, target)
        target.mkdir(exist_ok=True)

    def _end(self, target: Path, about: About, mine: dict[str, Any] | str) -> int | str:
        parts = gather_object(mine, self._group)
        result = None if parts is None else self._outcome(lambda: self._manifest(about, parts))
        result = broadcast_object(result, self._group, 0)
        problem = result if isinstance(result, str) else None
        if not isinstance(result, str):
            assert result is not None
            num_bytes, files, sizes = result
            steps: list[Callable[[], None]] = [lambda: self._put_in_folder(target, about.step, files)]
            if self._previous_host is not None:
                steps.insert(0, lambda: self._fetch(target, sizes))
            for step in steps:
                done = self._outcome(step) if self._memory.is_first else None
                if (problem := problem_among(all_gather_object(done, self._group))) is not None:
                    break
        if problem is None:
            return num_bytes
        if self._memory.is_first:
            for path in (target, self.root / folder.name_of(about.step)):
                shutil.rmtree(path, ignore_errors=True)
        return problem

    def _manifest(
        self, about: About, parts: Sequence[dict[str, Any] | str]
    ) -> tuple[int, dict[str, bytes], dict[str, int]] | str:
        """Return bytes of all ranks, files that each host adds, sizes of files; or what went wrong. On rank 0."""
        if (problem := problem_among(parts)) is not None:
            return problem
        manifest = merge([part for part in parts if not isinstance(part, str)], about)
        sizes = {name: file.num_bytes for name, file in manifest.files.items()}
        return manifest.num_bytes, {**about.files, MANIFEST: manifest.to_bytes()}, sizes

    def _fetch(self, target: Path, sizes: dict[str, int]) -> None:
        """Copy the files of the host before this one, which has them under the same temporary name."""
        assert self._previous_host is not None
        for rank in self._memory.ranks_of(self._previous_host):
            name = folder.file_of(rank)
            if name in sizes:
                remote = self._memory.remote(self._previous_host)
                remote.fetch(f"{target.name}/{name}", target / name, sizes[name])
                self._on_block()

    def _put_in_folder(self, target: Path, step: int, files: dict[str, bytes]) -> None:
        for name, data in files.items():
            (target / name).write_bytes(data)
        final = self.root / folder.name_of(step)
        shutil.rmtree(final, ignore_errors=True)  # left by a branch that the run has left
        target.rename(final)
