"""Checkpoints in the memory of a run's hosts.

Each host has a folder with the files of its own ranks, perhaps with those of the host before it, and the whole
manifest. Files of other hosts are read over the network.
"""

from __future__ import annotations

import logging
import os
import platform
import secrets
import shutil
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from colossus import machine
from colossus.arithmetic import byte_count
from colossus.checkpoint import folder
from colossus.checkpoint.checkpoint_store import Collect, Store, problem_among
from colossus.checkpoint.durable import problem_of
from colossus.checkpoint.errors import CheckpointError
from colossus.checkpoint.host_files import FileServer, RemoteFiles
from colossus.checkpoint.manifest import MANIFEST, About, Manifest, merge, read_manifest
from colossus.checkpoint.part import written
from colossus.checkpoint.reader import CheckpointReader
from colossus.checkpoint.save import Save
from colossus.checkpoint.tensor_file import BoxReader, ReadAt
from colossus.comm.listener import Address
from colossus.comm.objects import all_gather_object, broadcast_object, gather_object
from colossus.config import ConfigError
from colossus.context.groups import AxisGroup
from colossus.context.parallel_context import ParallelContext

log = logging.getLogger("colossus.checkpoint")


class MemoryStore(Store):
    """Checkpoints in folders in the memory of all hosts.

    Two generations stay. The oldest is removed when a third begins; by then the second is whole on all hosts.

    Args:
        root: the folder in the memory of this rank's host.
        context: this rank's context.
        copies: 2 if each host also fetches the files of the host before it, in the background; else 1.
        on_block: see `Store`.

    Attributes:
        hosts: number of the host of each rank.
        is_first: whether this rank is the first of its host.
    """

    def __init__(
        self, root: Path, context: ParallelContext, copies: int = 1, on_block: Callable[[], None] = lambda: None
    ) -> None:
        super().__init__(root, context, on_block, "checkpoint in memory")
        self._world = world = context.group(context.grid.names)
        places = all_gather_object(f"{machine.host_id()} {root}", world)
        numbers = {place: number for number, place in enumerate(dict.fromkeys(places))}
        self.hosts = tuple(numbers[place] for place in places)
        self.num_hosts, self.host = len(numbers), self.hosts[world.index]
        self.is_first = self.hosts.index(self.host) == world.index
        self._previous_host = (self.host - 1) % self.num_hosts if copies > 1 and self.num_hosts > 1 else None
        self._has_room = False
        self._server: FileServer | None = None
        self._addresses: dict[int, Address] = {}
        self._remote: dict[int, RemoteFiles] = {}
        self._key = b""
        if self.num_hosts > 1:
            self._key = broadcast_object(secrets.token_bytes(32), world, 0)
            own = machine.own_address()
            address = machine.address_among(own, all_gather_object(own, world))
            if self.is_first:
                self._server = FileServer(root, address, self._key)
            addresses = all_gather_object(None if self._server is None else self._server.address, world)
            self._addresses = {self.hosts[rank]: server for rank, server in enumerate(addresses) if server is not None}

    def ranks_of(self, host: int) -> list[int]:
        return [rank for rank, other in enumerate(self.hosts) if other == host]

    def remote(self, host: int) -> RemoteFiles:
        """Return the files of another host.

        Raises:
            CheckpointError: if it cannot be reached.
        """
        if host in self._remote and self._remote[host].has_failed:
            self._remote.pop(host).abort()  # a late answer must not be read as the answer to the next request
        if host not in self._remote:
            address = self._addresses[host]
            self._remote[host] = RemoteFiles(address, self._key, f"host {host} ({address[0]})")
        return self._remote[host]

    def get(self, later_than: int, until: int | None = None) -> MemoryReader | None:
        """Return a reader of the newest checkpoint whose files are each whole on some host. Collective.

        The first rank warns of each checkpoint that is skipped. One whose manifest is not on the host of the first rank
        is skipped, too.

        Args:
            later_than: last step that is not read any more.
            until: last step that is read; None for no limit.
        """
        steps_of_ranks = all_gather_object(list(folder.checkpoint_steps(self.root).values()), self._world)
        steps = {step for steps_of_rank in steps_of_ranks for step in steps_of_rank}
        for step in sorted(steps, reverse=True):
            is_eligible = step > later_than and (until is None or step <= until)
            if is_eligible and (reader := self._open(step)) is not None:
                return reader
        return None

    def remove_later(self, step: int) -> None:
        """Remove checkpoints of later steps, which are not whole or of a branch that the run has left."""
        if self.is_first:
            folder.remove_later(self.root, step)

    def close(self) -> None:
        for remote in self._remote.values():
            remote.close()
        if self._server is not None:
            self._server.close()

    def _open(self, step: int) -> MemoryReader | None:
        path = self.root / folder.name_of(step)
        manifest = broadcast_object(_manifest_of(path) if self._world.index == 0 else "", self._world, 0)
        if isinstance(manifest, str):
            self._warn(path, manifest)
            return None
        here = self.ranks_of(self.host)
        mine = sorted(manifest.files)[here.index(self._world.index) :: len(here)]
        checked = {name: problem_of(path / name, manifest.files[name].crc32) for name in mine if (path / name).exists()}
        places: dict[str, int] = {}
        problems: list[str] = []
        for host, problem_of_file in zip(self.hosts, all_gather_object(checked, self._world), strict=True):
            problems += [f"{problem} (host {host})" for problem in problem_of_file.values() if problem is not None]
            whole = [name for name, problem in problem_of_file.items() if problem is None]
            # a file on this host is read there, else on the first host that has it
            places |= {name: host for name in whole if host == self.host or name not in places}
        if missing := sorted(set(manifest.files) - set(places)):
            more = f" and {len(missing) - 1} more files" if missing[1:] else ""
            problems.append(f"no host has {missing[0]}{more} whole")
            self._warn(path, "; ".join(problems))
            return None
        elsewhere = {
            name: partial(self._read, host, f"{path.name}/{name}") for name, host in places.items() if host != self.host
        }
        return MemoryReader(path, manifest, elsewhere)

    def _read(self, host: int, name: str, offset: int, buffer: memoryview) -> int:
        return self.remote(host).read(name, offset, buffer)

    def _warn(self, path: Path, problem: str) -> None:
        if self._world.index == 0:
            log.warning("the checkpoint in memory %s is not used: %s", path.name, problem)

    # -- saving -------------------------------------------------------------------------------------------

    def put(self, collect: Collect, about: About, *, background: bool = True) -> Save:
        """Start to save, see `Store.put`.

        Raises:
            ConfigError: on all ranks, before the first save, if two generations do not fit into a host's memory.
        """
        self.finish()
        if not self._has_room:
            self._require_room(collect)
            self._has_room = True
        return super().put(collect, about, background=background)

    def _require_room(self, collect: Collect) -> None:
        def count() -> int:
            return sum(part.num_bytes for part in written(collect()[0]))

        written_bytes = all_gather_object(self._outcome(count), self._group)
        if problem_among(written_bytes) is not None:  # the save will say so
            return

        def num_bytes(host: int) -> int:
            return sum(int(written_bytes[rank]) for rank in self.ranks_of(host))

        staged = num_bytes(self.host)
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
            if self.is_first:
                shutil.rmtree(old, ignore_errors=True)
        if self.is_first:
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
                done = self._outcome(step) if self.is_first else None
                if (problem := problem_among(all_gather_object(done, self._group))) is not None:
                    break
        if problem is None:
            return num_bytes
        if self.is_first:
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
        for rank in self.ranks_of(self._previous_host):
            name = folder.file_of(rank)
            if name in sizes:
                remote = self.remote(self._previous_host)
                remote.fetch(f"{target.name}/{name}", target / name, sizes[name])
                self._on_block()

    def _put_in_folder(self, target: Path, step: int, files: dict[str, bytes]) -> None:
        for name, data in files.items():
            (target / name).write_bytes(data)
        final = self.root / folder.name_of(step)
        shutil.rmtree(final, ignore_errors=True)  # left by a branch that the run has left
        target.rename(final)


def _manifest_of(path: Path) -> Manifest | str:
    try:
        return read_manifest(path)
    except CheckpointError as error:
        return str(error)


class MemoryReader(CheckpointReader):
    """A reader of a checkpoint in memory, whose checksums `MemoryStore.get` has compared.

    Args:
        folder: folder on this host.
        manifest: its manifest.
        elsewhere: functions that read the files of other hosts, by name.
    """

    def __init__(self, folder: Path, manifest: Manifest, elsewhere: Mapping[str, ReadAt]) -> None:
        self.folder, self.manifest, self._elsewhere = folder, manifest, elsewhere
        self._boxes = BoxReader()
        self._descriptors: dict[str, int] = {}

    def verify(self, group: AxisGroup | None = None, on_block: Callable[[], None] = lambda: None) -> None:
        """Do nothing: `MemoryStore.get` has compared the checksums."""

    def _file(self, name: str) -> ReadAt:
        return self._elsewhere[name] if name in self._elsewhere else super()._file(name)
