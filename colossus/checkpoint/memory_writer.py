"""Writing checkpoints into the memory of the hosts: the ordinary writer, but each host keeps what its ranks write."""

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
from colossus.checkpoint.tensor_box import RankState
from colossus.checkpoint.writer import CheckpointWriter, Save, problem_among
from colossus.comm.objects import all_gather_object, broadcast_object, gather_object
from colossus.config import ConfigError
from colossus.context.parallel_context import ParallelContext


class MemoryWriter(CheckpointWriter):
    """Two generations stay: when a third is begun the oldest is removed, and by then the second is whole on all hosts.

    Args:
        copies: 2: each host also keeps what the host before it has written, which it fetches in the background.
    """

    def __init__(
        self, memory: HostMemory, context: ParallelContext, copies: int, on_block: Callable[[], None] = lambda: None
    ) -> None:
        super().__init__(memory.root, context, on_block=on_block, label="checkpoint in memory")
        self._memory, self._has_room = memory, False
        self._of_before = (memory.host - 1) % memory.num_hosts if copies > 1 and memory.num_hosts > 1 else None

    def save(self, collect: Callable[[], RankState], about: About, *, background: bool = True) -> Save:
        """As `CheckpointWriter.save`.

        Raises:
            ConfigError: on all ranks, before the first save, when two generations do not fit into a host's memory.
        """
        self.finish()
        if not self._has_room:
            self._require_room(collect)
            self._has_room = True
        return super().save(collect, about, background=background)

    def _require_room(self, collect: Callable[[], RankState]) -> None:
        def count() -> int:
            return sum(box.local.numel() * box.local.element_size() for box in collect().written())

        of_ranks = all_gather_object(self._outcome(count), self._group)
        if problem_among(of_ranks) is not None:  # the save will say so
            return

        def num_bytes(host: int) -> int:
            return sum(int(of_ranks[rank]) for rank in self._memory.ranks_of(host))

        staged = num_bytes(self._memory.host)
        needed = 2 * (staged + (num_bytes(self._of_before) if self._of_before is not None else 0))
        held = sum(path.stat().st_size for path in self.root.glob("step-*/*"))
        system, (_, available) = os.statvfs(self.root), machine.memory_bytes()
        free = system.f_bavail * system.f_frsize
        room = held + (free if available is None else min(free, max(available - staged, 0)))
        problem = None
        if needed > room:
            of_whom = "its ranks and of the host before it" if self._of_before is not None else "its ranks"
            problem = (
                f"checkpoint.memory_every: two generations of the state of {of_whom} are {byte_count(needed)}, and "
                f"host {platform.node()} has {byte_count(room)} left in {self.root.parent}, beside the copy that is "
                f"written from: leave it out, or take more hosts"
            )
        if problem := problem_among(all_gather_object(problem, self._group)):
            raise ConfigError(problem)

    def _prepare(self, target: Path) -> None:
        for old in sorted(folder.named(self.root))[:-1]:
            # what each rank has written itself makes room for what it writes now: it waits for no other
            (old / folder.file_of(self._group.index)).unlink(missing_ok=True)
            if self._memory.is_first:
                shutil.rmtree(old, ignore_errors=True)
        if self._memory.is_first:
            folder.remove_left_over(self.root, target)
        target.mkdir(exist_ok=True)

    def _end(self, target: Path, about: About, mine: dict[str, Any] | str) -> int | str:
        of_ranks = gather_object(mine, self._group)
        made = None if of_ranks is None else self._outcome(lambda: self._manifest(about, of_ranks))
        made = broadcast_object(made, self._group, 0)
        problem = made if isinstance(made, str) else None
        if not isinstance(made, str):
            assert made is not None
            num_bytes, files, sizes = made
            steps: list[Callable[[], None]] = [lambda: self._put_in_folder(target, about.step, files)]
            if self._of_before is not None:
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
        self, about: About, of_ranks: Sequence[dict[str, Any] | str]
    ) -> tuple[int, dict[str, bytes], dict[str, int]] | str:
        """On rank 0: bytes of all ranks, what each host writes beside its ranks' files, sizes of files; or what went
        wrong."""
        if (problem := problem_among(of_ranks)) is not None:
            return problem
        manifest = merge([each for each in of_ranks if not isinstance(each, str)], about)
        sizes = {name: file.num_bytes for name, file in manifest.files.items()}
        return manifest.num_bytes, {**about.files, MANIFEST: manifest.to_bytes()}, sizes

    def _fetch(self, target: Path, sizes: dict[str, int]) -> None:
        """Copy the files of the host before this one, which has them under the same name still."""
        assert self._of_before is not None
        for rank in self._memory.ranks_of(self._of_before):
            name = folder.file_of(rank)
            if name in sizes:
                remote = self._memory.remote(self._of_before)
                remote.fetch(f"{target.name}/{name}", target / name, sizes[name])
                self._on_block()

    def _put_in_folder(self, target: Path, step: int, files: dict[str, bytes]) -> None:
        for name, data in files.items():
            (target / name).write_bytes(data)
        final = self.root / folder.name_of(step)
        shutil.rmtree(final, ignore_errors=True)  # of the branch before
        target.rename(final)
