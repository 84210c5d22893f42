"""The hardware that ``colossus plan`` plans for: from a data sheet, from a file of measured times, or measured now."""

from __future__ import annotations

import argparse
import re
import sys
from dataclasses import replace

from colossus.arithmetic import counted, parse_bytes
from colossus.config import ConfigError
from colossus.hardware.data_sheets import WITH_LINKS
from colossus.hardware.hardware import Hardware, Link
from colossus.hardware.measured import Measured
from colossus.hardware.named_hardware import named_hardware

#: the most ranks with which this machine is measured; more take minutes
MOST_MEASURED = 8
_EXPONENTS = {"us": "e-6", "ms": "e-3", "s": ""}


def network_argument(text: str) -> Link:
    """Return the link that a text describes: ``10us,50GB/s``, or in bits ``10us,400Gb/s``."""
    match = re.fullmatch(r"([\d.]+)(us|ms|s),(.+)/s", text.replace(" ", ""))
    try:
        if match is None:
            raise ValueError
        bandwidth = parse_bytes(match[3]) / (8 if match[3].endswith("b") else 1)
        return Link(float(match[1] + _EXPONENTS[match[2]]), bandwidth)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no latency and bandwidth; write 10us,50GB/s, or in bits 10us,400Gb/s"
        ) from None


def choose_hardware(name: str | None, network: Link | None, devices: int, dtype: str) -> Hardware:
    """Return the hardware of ``--hardware``; without a name this machine's GPU, or its CPU if it has no GPU.

    Args:
        name: a data sheet, a file of measured times, ``cpu`` or None.
        network: link of each device to devices of other hosts.
        devices: devices of the plan: as many ranks run at once while the CPU is measured.
        dtype: dtype in which the model computes.

    Raises:
        ConfigError: the device has no data sheet, the file is not one of measured times, or there are more devices than
            ranks with which a CPU is measured.
    """
    try:
        if name is None:
            import torch

            name = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "cpu"
        return _measured_now(network, devices, dtype) if name == "cpu" else named_hardware(name, network)
    except ValueError as error:
        raise ConfigError(f"--hardware: {error}") from None


def _measured_now(network: Link | None, devices: int, dtype: str) -> Hardware:
    if devices > MOST_MEASURED:
        raise ValueError(
            f"this machine's CPU is measured with {MOST_MEASURED} ranks at most, not with {counted(devices, 'rank')}; "
            f"name a data sheet ({', '.join(WITH_LINKS)}), or a file of measured times that "
            f"`colossus doctor --measure OUT.json` writes"
        )
    from colossus.context.local_ranks import RanksFailed
    from colossus.doctor.measure import ON_CPU, measure_ranks

    print(f"measuring this machine's CPU with {counted(devices, 'rank')} for some seconds ..", file=sys.stderr)
    sizes = replace(
        ON_CPU,
        dtypes=tuple(sorted({"fp32", dtype})),
        matmul=(32, 128, 512),
        lengths=(128, 512),
        messages=ON_CPU.messages[1:-1:2],
        seconds=4.0,
        steps=5,
    )
    try:
        return Measured(measure_ranks(devices, "cpu", sizes), network)
    except RanksFailed as error:
        raise ValueError(f"this machine could not be measured: {error}") from None
