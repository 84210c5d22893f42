"""Figures from the data sheets of vendors, and a device whose speed follows from them."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace

from colossus.hardware.hardware import Hardware, Link, bytes_sent, steps
from colossus.registry import nearest

KINDS = ("fp16", "bf16", "tf32", "fp32", "fp64")


@dataclass(frozen=True)
class DataSheet:
    """The figures of one device; None where its sheet has no figure, or none is recorded here.

    Attributes:
        fp16, bf16, tf32, fp32, fp64: dense TFLOP/s, without sparsity.
        memory: bytes.
        memory_bandwidth: bytes per second.
        link: bytes per second over all NVLink or Infinity Fabric links of the device together, in one direction: half
            of the figure in large print, which counts both.
    """

    fp16: float | None
    bf16: float | None
    tf32: float | None
    fp32: float | None
    fp64: float | None
    memory: float | None = None
    memory_bandwidth: float | None = None
    link: float | None = None


# TFLOP/s: figures that sheets give only with sparsity (Hopper, Ada, Blackwell) are halved. The fp64 figures, and fp32
# of AMD, are those of the matrix units if a device has them. Products of fp16 and bf16 accumulate in fp32, as torch
# lets them: on GeForce that is half of the figure in large print.
# Memory and links: NVIDIA's data sheets of V100 (SXM2, 32 GB; NVLink 300 GB/s), A100 (SXM, 80 GB; 600 GB/s), H100 and
# H200 (SXM; 900 GB/s), H800 (400 GB/s) and DGX B200 (1,440 GB and 64 TB/s of eight; 1.8 TB/s), AMD's of MI300X (seven
# links of 128 GB/s).
#: data sheets by short name
SHEETS: dict[str, DataSheet] = {
    "B200": DataSheet(2250.0, 2250.0, 1125.0, 75.0, 37.0, 180e9, 8.0e12, 900e9),
    "B300": DataSheet(2250.0, 2250.0, 1125.0, None, None),
    "GB200": DataSheet(2500.0, 2500.0, 1250.0, 80.0, 40.0),
    "GB300": DataSheet(2500.0, 2500.0, 1250.0, None, None),
    "H100": DataSheet(989.5, 989.5, 494.5, 67.0, 67.0, 80e9, 3.35e12, 450e9),
    "H100 PCIE": DataSheet(756.5, 756.5, 378.0, 51.0, 51.0),
    "H100 NVL": DataSheet(835.5, 835.5, 417.5, 60.0, 60.0),
    "H800": DataSheet(989.5, 989.5, 494.5, 67.0, 1.0, 80e9, 3.35e12, 200e9),
    "H200": DataSheet(989.5, 989.5, 494.5, 67.0, 67.0, 141e9, 4.8e12, 450e9),
    "H200 NVL": DataSheet(835.5, 835.5, 417.5, 60.0, 60.0),
    "GH200": DataSheet(989.5, 989.5, 494.5, 67.0, 67.0),
    "L4": DataSheet(121.0, 121.0, 60.0, 30.3, None),
    "L40": DataSheet(181.05, 181.05, 90.5, 90.5, None),
    "L40S": DataSheet(362.05, 362.05, 183.0, 91.6, None),
    "RTX 4090": DataSheet(165.2, 165.2, 82.6, 82.6, None),
    "RTX 5090": DataSheet(209.5, 209.5, 104.8, 104.8, None),
    "A100": DataSheet(312.0, 312.0, 156.0, 19.5, 19.5, 80e9, 2.039e12, 300e9),
    "A100 PCIE": DataSheet(312.0, 312.0, 156.0, 19.5, 19.5),
    "A40": DataSheet(149.7, 149.7, 74.8, 37.4, None),
    "A10": DataSheet(125.0, 125.0, 62.5, 31.2, None),
    "RTX A6000": DataSheet(154.8, 154.8, 77.4, 38.7, None),
    "RTX 3090": DataSheet(71.0, 71.0, 35.6, 35.6, None),
    "T4": DataSheet(65.0, None, None, 8.1, None),
    "V100 SXM2": DataSheet(125.0, None, None, 15.7, 7.8, 32e9, 0.9e12, 150e9),
    "V100 PCIE": DataSheet(112.0, None, None, 14.0, 7.0),
    "MI300X": DataSheet(1307.4, 1307.4, None, 163.4, 163.4, 192e9, 5.3e12, 448e9),
    "MI325X": DataSheet(1307.4, 1307.4, None, 163.4, 163.4),
}
#: names of the devices that plans can be estimated for
WITH_LINKS = [name for name, sheet in SHEETS.items() if sheet.link is not None]
_NO_NAME = re.compile(r"NVIDIA|TESLA|GEFORCE|AMD|INSTINCT|HBM3|SXM[456]|OAM|AC|\d+GB")


def short_name(device_name: str) -> str:
    """Return a device's name without vendor, series and size of memory: ``NVIDIA H100 80GB HBM3`` is ``H100``.

    All other words stay: a slice (``H100 MIG 1G.10GB``), a ``RTX 4090 LAPTOP GPU`` and an ``A10G`` are other devices.
    """
    return " ".join(word for word in re.split(r"[\s-]+", device_name.upper()) if not _NO_NAME.fullmatch(word))


def peak_flops(device_name: str, precision: str, *, tf32: bool = False) -> float | None:
    """Return the peak FLOP/s of a GPU by its name, None if no sheet has it at this precision.

    Args:
        device_name: name that torch reports.
        precision: dtype of the operands of products, ``fp64``, ``fp32``, ``bf16`` or ``fp16``.
        tf32: whether products of fp32 run in TensorFloat-32 on devices that have it.
    """
    sheet = SHEETS.get(short_name(device_name))
    if sheet is None or precision not in KINDS:
        return None
    kind = "tf32" if precision == "fp32" and tf32 and sheet.tf32 else precision
    peak: float | None = getattr(sheet, kind)
    return None if peak is None else peak * 1e12


# -- a device that nobody has measured ------------------------------------------------------------------------


@dataclass(frozen=True)
class Reached:
    """The part of a device's peak that products and attention reach.

    Attributes:
        units: streaming multiprocessors or compute units; each computes one tile of a product at a time.
        matmul: fraction of the peak of products, in bf16 with normally distributed values, while each unit has a tile.
        attention: fraction of the peak of a forward with long causal sequences.
    """

    units: int
    matmul: float
    attention: float


# matmul: published TFLOP/s of large products, divided by the peak and by the full part of their waves of tiles.
#   A100: 257 at 8192^3 (thonking.ai, Strangely, Matrix Multiplications on GPUs Run Faster ..). H100, H200: 720, MI300X:
#   620, at products of Llama 3 70B (SemiAnalysis, MI300X vs H100 vs H200, part 1). B200: 1,672 at 8192^3 (2604.23466).
#   V100: up to 83 (1803.04014, shape not given). The best of many shapes (github.com/stas00/ml-engineering,
#   compute/accelerator) are 271 on A100, 795 on H100, 1,745 on B200, 668 on MI300X.
# attention: FlashAttention-2, which torch runs. H100: 335 TFLOP/s of head dim 128 (2407.08608, figure 5); not causal
#   370. A100: not causal 73 % (2307.08691). B200: cuDNN's 1,613 / 1.3 TFLOP/s (FlashAttention-4, abstract); both times
#   335 / 370. V100 and MI300X: a round number.
#: by short name
REACHED: dict[str, Reached] = {
    "B200": Reached(148, 0.75, 0.5),
    "H100": Reached(132, 0.75, 0.345),
    "H800": Reached(132, 0.75, 0.345),
    "H200": Reached(132, 0.75, 0.345),
    "A100": Reached(108, 0.825, 0.66),
    "V100 SXM2": Reached(80, 0.66, 0.3),
    "MI300X": Reached(304, 0.49, 0.3),
}
#: rows and columns of a tile, or the reverse: cuBLAS' most efficient (NVIDIA, Matrix Multiplication Background, 2.3)
TILE = 128, 256
#: tokens of a sequence with half of the rate of long ones (2407.08608, figure 5: 191, 260, 298, 319, 333 TFLOP/s at
#: 512, 1k, 2k, 4k, 8k), and backward's part of forward's rate (figure 6: 322 of 370; on A100 63 of 73 %, 2307.08691)
SHORT, BACKWARD = 350, 0.87
#: fraction of the memory's bandwidth: a round number
MEMORY_EFFICIENCY = 0.85
#: fraction of a link's bandwidth: all-gathers of eight H100 reach 350 of 450 GB/s, reduce-scatters 360
#: (github.com/NVIDIA/nccl, issue 1281), those of H800 160 of 200 (2412.19437)
LINK_EFFICIENCY = 0.8
#: fraction of a device that a collective takes: 20 of 132 units (2412.19437, section 3.2.2)
OCCUPIED = 0.15
#: seconds between two kernels that are queued: a round number
GAP = 1e-6
#: seconds that Python, autograd and torch need to start an operator: a round number for one core of a server
OPERATOR = 10e-6
# NCCL's own model (src/graph/tuning.cc, ring, protocol Simple): seconds of a call, of a step over NVLink, and of a step
# over the network
CALL, LINK_STEP, NETWORK_STEP = 8.4e-6, 3.4e-6, 14e-6
#: 400 Gb/s for each device, as in DGX H100 (eight ConnectX-7 for eight devices)
NETWORK = Link(NETWORK_STEP, LINK_EFFICIENCY * 400e9 / 8)
#: bytes of an element by the name of its dtype
WIDTHS = {"fp16": 2, "bf16": 2, "tf32": 4, "fp32": 4, "fp64": 8}


class FromDataSheet(Hardware):
    """A device by its data sheet and the efficiencies of this module; none of its figures is measured.

    Args:
        device: name as in `SHEETS`, in upper or lower case; ``v100`` is the SXM2.
        network: link of each device to devices of other hosts.
        matmul: in place of `Reached.matmul`.
        changed: figures of its sheet that another edition of the device has, such as ``memory``.

    Raises:
        ValueError: the device has no sheet here, or its sheet has no figures of memory and links.
    """

    is_measured, overlaps, occupied = False, True, OCCUPIED
    operator_seconds, at_once = OPERATOR, None

    def __init__(self, device: str, network: Link = NETWORK, *, matmul: float | None = None, **changed: float) -> None:
        name = {"V100": "V100 SXM2"}.get(short_name(device), short_name(device))
        sheet = SHEETS.get(name)
        if sheet is None or name not in WITH_LINKS:
            close = nearest(name, WITH_LINKS)
            hint = f"; did you mean {close}?" if close else ""
            have = f"{', '.join(WITH_LINKS)} have them{hint}"
            raise ValueError(f"{device!r} has no data sheet here with memory and links; {have}")
        sheet, reached = replace(sheet, **changed), REACHED[name]
        assert sheet.memory is not None
        assert sheet.memory_bandwidth is not None
        assert sheet.link is not None
        self.reached = reached if matmul is None else replace(reached, matmul=matmul)
        self.sheet, self.network = sheet, network
        self.name, self.memory_bytes = f"{name} (data sheet)", sheet.memory
        self._memory_bandwidth, self._link = sheet.memory_bandwidth, sheet.link

    def peak_flops(self, dtype: str) -> float | None:
        return self._peak(dtype)

    def matmul_seconds(self, m: int, n: int, k: int, dtype: str) -> float:
        return self.products_seconds(1, m, n, k, dtype)

    def products_seconds(self, count: float, m: int, n: int, k: int, dtype: str) -> float:
        """Return the seconds of waves of tiles, or of reading the factors and writing the products (the roofline).

        The last wave takes as long as a full one. A product of less than one wave splits k over the other units.
        """
        rows, columns = TILE
        tiles = count * min(-(-m // rows) * -(-n // columns), -(-m // columns) * -(-n // rows))
        full = tiles / self.reached.units
        flops = 2.0 * rows * columns * k * self.reached.units * (math.ceil(full) if full > 1 else full)
        moved = count * (m * k + k * n + m * n) * WIDTHS.get(dtype, 4)
        return GAP + max(flops / (self.reached.matmul * self._peak(dtype)), self._moving(moved))

    def attention_seconds(self, heads: int, length: int, head_dim: int, dtype: str, *, backward: bool = False) -> float:
        """Return the seconds of half the square of scores; backward has 2.5 times forward's (FlashAttention)."""
        flops = 2.0 * heads * length * (length + SHORT) * head_dim * (2.5 / BACKWARD if backward else 1)
        return GAP + flops / (self.reached.attention * self._peak(dtype))

    def memory_seconds(self, num_bytes: float, operator: str = "") -> float:
        return GAP + self._moving(num_bytes)

    def on_one_host(self, operation: str, ranks: int, input_bytes: float) -> float:
        sending = bytes_sent(operation, ranks, input_bytes) / (LINK_EFFICIENCY * self._link)
        return CALL + steps(operation, ranks) * LINK_STEP + sending

    def _moving(self, num_bytes: float) -> float:
        return num_bytes / (MEMORY_EFFICIENCY * self._memory_bandwidth)

    def _peak(self, dtype: str) -> float:
        peak: float | None = getattr(self.sheet, dtype) if dtype in KINDS else None
        if peak is None:
            kinds = [kind for kind in KINDS if getattr(self.sheet, kind)]
            raise ValueError(f"{self.name} has no figure for products in {dtype}; it has {', '.join(kinds)}")
        return peak * 1e12
