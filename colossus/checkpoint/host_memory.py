"""Checkpoints in the memory of a run's hosts.

Each host has a folder with the files of its own ranks, perhaps with those of the host before it, and the whole
manifest. Files of other hosts are read over the network.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from colossus import machine
from colossus.checkpoint import folder
from colossus.checkpoint.durable import problem_of
from colossus.checkpoint.errors import CheckpointError
from colossus.checkpoint.host_files import FileServer, RemoteFiles
from colossus.checkpoint.manifest import Manifest, read_manifest
from colossus.checkpoint.reader import CheckpointReader
from colossus.checkpoint.tensor_file import BoxReader, ReadAt
from colossus.comm.listener import Address
from colossus.comm.objects import all_gather_object, broadcast_object
from colossus.context.groups import AxisGroup

log = logging.getLogger("colossus.checkpoint")


class HostMemory:
    """The folders of all hosts. Collective: every rank makes one.

    Args:
        root: the folder in the memory of this rank's host.
        group: group of all ranks.

    Attributes:
        hosts: number of the host of each rank.
        is_first: whether this rank is the first of its host.
    """

    def __init__(self, root: Path, group: AxisGroup) -> None:
        self.root, self._group = root, group
        places = all_gather_object(f"{machine.host_id()} {root}", group)
        numbers = {place: number for number, place in enumerate(dict.fromkeys(places))}
        self.hosts = tuple(numbers[place] for place in places)
        self.num_hosts, self.host = len(numbers), self.hosts[group.index]
        self.is_first = self.hosts.index(self.host) == group.index
        self._server: FileServer | None = None
        self._addresses: dict[int, Address] = {}
        self._remote: dict[int, RemoteFiles] = {}
        self._key = b""
        if self.num_hosts > 1:
            self._key = broadcast_object(secrets.token_bytes(32), group, 0)
            own = machine.own_address()
            address = machine.address_among(own, all_gather_object(own, group))
            if self.is_first:
                self._server = FileServer(root, address, self._key)
            addresses = all_gather_object(None if self._server is None else self._server.address, group)
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

    def newest(self, later_than: int, until: int | None = None) -> MemoryReader | None:
        """Return a reader of the newest checkpoint whose files are each whole on some host. Collective.

        The first rank warns of each checkpoint that is skipped. One whose manifest is not on the host of the first rank
        is skipped, too.

        Args:
            later_than: last step that is not read any more.
            until: last step that is read; None for no limit.
        """
        steps_of_ranks = all_gather_object(list(folder.checkpoint_steps(self.root).values()), self._group)
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
        manifest = broadcast_object(_manifest_of(path) if self._group.index == 0 else "", self._group, 0)
        if isinstance(manifest, str):
            self._warn(path, manifest)
            return None
        here = self.ranks_of(self.host)
        mine = sorted(manifest.files)[here.index(self._group.index) :: len(here)]
        checked = {name: problem_of(path / name, manifest.files[name].crc32) for name in mine if (path / name).exists()}
        places: dict[str, int] = {}
        problems: list[str] = []
        for host, problem_of_file in zip(self.hosts, all_gather_object(checked, self._group), strict=True):
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
        if self._group.index == 0:
            log.warning("the checkpoint in memory %s is not used: %s", path.name, problem)


def _manifest_of(path: Path) -> Manifest | str:
    try:
        return read_manifest(path)
    except CheckpointError as error:
        return str(error)


class MemoryReader(CheckpointReader):
    """A reader of a checkpoint in memory, whose checksums `HostMemory.newest` has compared.

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
        """Do nothing: `HostMemory.newest` has compared the checksums."""

    def _file(self, name: str) -> ReadAt:
        return self._elsewhere[name] if name in self._elsewhere else super()._file(name)
