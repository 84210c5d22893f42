"""The hardware that a plan is for, by name. No torch."""

from __future__ import annotations

from colossus import machine
from colossus.hardware.data_sheets import NETWORK, FromDataSheet
from colossus.hardware.hardware import Hardware, Link
from colossus.hardware.measured import Measured, load_measured
from colossus.hardware.typical_cpu import TypicalCPU


def named_hardware(name: str, network: Link | None = None) -> Hardware:
    """A file of measured times (``.json``) or a data sheet.

    Args:
        network: between hosts.

    Raises:
        ValueError: for a device that is not known, and a file that is none of measured times.
    """
    return load_measured(name, network) if name.endswith(".json") else FromDataSheet(name, network or NETWORK)


def typical_cpu(local_ranks: int) -> TypicalCPU:
    """This machine's cores and memory, shared by so many ranks."""
    memory, _ = machine.memory_bytes()
    return TypicalCPU(machine.usable_cores(), machine.threads_per_rank(local_ranks), memory / local_ranks)


def default_hosts(hardware: Hardware, devices: int) -> int:
    """As few as have at most eight devices each, all as many; one of CPUs."""
    if isinstance(hardware, TypicalCPU) or (isinstance(hardware, Measured) and hardware.file.device == "cpu"):
        return 1
    return next(hosts for hosts in range(-(-devices // 8), devices + 1) if devices % hosts == 0)
