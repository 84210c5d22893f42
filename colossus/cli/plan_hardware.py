"""The hardware that ``colossus plan`` plans for: by a data sheet, by a file of measured times, or measured now."""

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

#: ranks at once that this machine is measured with; more take minutes
MOST_MEASURED = 8
_EXPONENTS = {"us": "e-6", "ms": "e-3", "s": ""}


def network_argument(text: str) -> Link:
    """``10us,50GB/s``, or ``10us,400Gb/s`` in bits."""
    found = re.fullmatch(r"([\d.]+)(us|ms|s),(.+)/s", text.replace(" ", ""))
    try:
        if found is None:
            raise ValueError
        bandwidth = parse_bytes(found[3]) / (8 if found[3].endswith("b") else 1)
        return Link(float(found[1] + _EXPONENTS[found[2]]), bandwidth)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no latency and bandwidth; write 10us,50GB/s, or 10us,400Gb/s of bits"
        ) from None


def choose_hardware(given: str | None, network: Link | None, devices: int, dtype: str) -> Hardware:
    """What ``--hardware`` names; without it this machine's GPU, and where it has none, its CPU.

    Args:
        network: between hosts.
        devices: of the plan: so many ranks work at once while the CPU is measured.
        dtype: in which the model computes.

    Raises:
        ConfigError: for a device that is not known, a file that is none of measured times, and more devices than
            a CPU is measured with.
    """
    try:
        if given is None:
            import torch

            given = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "cpu"
        return _measured_now(network, devices, dtype) if given == "cpu" else named_hardware(given, network)
    except ValueError as error:
        raise ConfigError(f"--hardware: {error}") from None


def _measured_now(network: Link | None, devices: int, dtype: str) -> Hardware:
    if devices > MOST_MEASURED:
        raise ValueError(
            f"{counted(devices, 'rank')} at once are not measured on this machine's CPU ({MOST_MEASURED} at most); "
            f"name a data sheet, --hardware h100 say (known: {', '.join(WITH_LINKS)}), or a file of measured times "
            f"that `colossus doctor --measure OUT.json` writes"
        )
    from colossus.context.local_ranks import RanksFailed
    from colossus.doctor.measure import ON_CPU, measure_ranks

    print(f"measuring {counted(devices, 'rank')} of this machine's CPU for some seconds ..", file=sys.stderr)
    sizes = replace(
        ON_CPU,
        dtypes=tuple(sorted({"fp32", dtype})),
        matmul=(32, 128, 512),
        lengths=(128, 512),
        messages=ON_CPU.messages[1:-1:2],
        seconds=4.0,
    )
    try:
        return Measured(measure_ranks(devices, "cpu", sizes), network)
    except RanksFailed as error:
        raise ValueError(f"this machine could not be measured: {error}") from None
