"""The hardware that a plan is for, by name. No torch."""

from __future__ import annotations

from colossus import machine
from colossus.hardware.data_sheets import NETWORK, FromDataSheet
from colossus.hardware.hardware import Hardware, Link
from colossus.hardware.measured import Measured, load_measured
from colossus.hardware.typical_cpu import TypicalCPU


def named_hardware(name: str, network: Link | None = None) -> Hardware:
    """Return the hardware that a file of measured times (``.json``) or a data sheet describes.

    Args:
        name: path of the file, or name of the device.
        network: link of each device to devices of other hosts.

    Raises:
        ValueError: the device has no data sheet here, or the file is not one of measured times.
    """
    return load_measured(name, network) if name.endswith(".json") else FromDataSheet(name, network or NETWORK)


def typical_cpu(local_ranks: int) -> TypicalCPU:
    """Return a typical CPU with this machine's cores and memory, shared by ``local_ranks`` ranks."""
    memory, _ = machine.memory_bytes()
    return TypicalCPU(machine.usable_cores(), machine.threads_per_rank(local_ranks), memory / local_ranks)


def default_hosts(hardware: Hardware, devices: int) -> int:
    """Return the fewest hosts that share out the devices evenly, with at most eight on each; one for CPUs."""
    if isinstance(hardware, TypicalCPU) or (isinstance(hardware, Measured) and hardware.file.device == "cpu"):
        return 1
    return next(hosts for hosts in range(-(-devices // 8), devices + 1) if devices % hosts == 0)
