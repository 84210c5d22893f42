"""Tensor modes on paper: where 2D, 2.5D and 3D beat 1D by our count, and what the papers of these modes claim.

    python -m benchmarks.modes_on_paper
    python -m benchmarks.modes_on_paper --plot docs/static/modes.svg

Nothing is measured: the steps of a transformer under tensor parallelism alone are predicted on data sheets. The papers:
Optimus (2104.05343, 2D), Tesseract (2105.14500, 2.5D), and 2105.14450 (3D). Their ratios are over 1D on 64 devices.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import common
from colossus.arithmetic import byte_count
from colossus.chart.draw_picture import save_charts
from colossus.chart.panel import Line, Panel
from colossus.config import Config, load_config
from colossus.hardware.data_sheets import NETWORK_STEP, FromDataSheet
from colossus.hardware.hardware import Link
from colossus.planner.estimate import Estimator
from colossus.planner.layout_profile import LayoutProfile
from colossus.planner.plan_estimate import PlanEstimate
from colossus.planner.plan_stages import layout_key

#: the sizes of Optimus' own benchmark (hidden 2,048, 32 heads on 4 devices, 24 layers, 512 tokens), grown with the
#: root of the devices as its weak scaling does
PAPERS = dict(type="GPT", num_layers=24, hidden_size=8192, num_heads=128, vocab_size=512, seq_len=512)
#: Llama 3 70B (2407.21783)
LLAMA = dict(
    type="Llama", num_layers=80, hidden_size=8192, num_heads=64, num_kv_heads=8, ffn_hidden_size=28672,
    vocab_size=128256, seq_len=4096,
)  # fmt: skip
#: inputs and weights are gathered for each product, as the papers do it; or once for a microbatch
AGAIN = dict(gathered="again", weights="matmul")
KEPT = dict(gathered="keep", weights="microbatch")
#: what is compared: mode, options, shapes by ranks
WAYS: dict[str, tuple[str, dict[str, Any], list[tuple[int, ...]]]] = {
    "1D": ("1d", {}, [(2**power,) for power in range(2, 10)]),
    "1D, tokens split": ("1d", dict(sequence_sharded=True), [(2**power,) for power in range(2, 10)]),
    "2D": ("2d", KEPT, [(2, 2), (4, 4), (8, 8), (16, 16)]),
    "2.5D": ("2.5d", KEPT, [(2, 2, 2), (2, 4, 4), (4, 4, 4), (2, 8, 8), (4, 8, 8), (8, 8, 8)]),
    "3D": ("3d", KEPT, [(2, 2, 2), (4, 4, 4), (8, 8, 8)]),
}
SQUARES = {"1d": (64,), "2d": (8, 8), "2.5d": (4, 4, 4), "3d": (4, 4, 4)}
#: what 16 GB hold, the memory of the devices of two of the papers
SMALL = 16e9


@dataclass(frozen=True)
class Links:
    """Devices and how they are joined.

    Attributes:
        on_a_host: devices of a host, which NVLink joins.
        bandwidth: of each device to other hosts, bytes per second.
    """

    device: str
    on_a_host: int
    bandwidth: float

    def __str__(self) -> str:
        hosts = f"hosts of {self.on_a_host}" if self.on_a_host > 1 else "no NVLink"
        return f"{self.device.upper()}, {hosts}, {self.bandwidth / 1e9:g} GB/s"


class OneModel(Estimator):
    """Estimates of one model on given links; the profiles of its layouts are shared by all of them."""

    def __init__(self, links: Links, ranks: int, profiles: dict[Any, LayoutProfile]) -> None:
        hardware = FromDataSheet(links.device, network=Link(NETWORK_STEP, links.bandwidth))
        super().__init__(hardware, hosts=max(1, ranks // links.on_a_host))
        self.profiles = profiles

    def profile(self, config: Config, *, split_backward: bool | None = None) -> LayoutProfile:
        key = layout_key(config)
        if key not in self.profiles:
            self.profiles[key] = super().profile(config, split_backward=split_backward)
        return self.profiles[key]


@dataclass
class Study:
    """A model, its batch, and its steps under tensor parallelism alone."""

    model: Mapping[str, Any]
    batch: int
    precision: str
    profiles: dict[Any, LayoutProfile] = field(default_factory=dict)

    def step(
        self, links: Links, mode: str, shape: tuple[int, ...], *, batch: int | None = None, recompute: str = "none",
        **flags: Any,
    ) -> PlanEstimate:  # fmt: skip
        """Estimate a step; ConfigError where the shape does not fit the model."""
        tensor = dict(mode=mode, size=math.prod(shape), shape=shape, **flags)
        train = dict(global_batch_size=batch or self.batch, precision=self.precision, activation_checkpoint=recompute)
        config = load_config({
            "parallel": dict(data=1, tensor=tensor),
            "model": self.model, "data": dict(type="PythonStdlib"), "optimizer": dict(type="Adam"), "train": train,
        })  # fmt: skip
        return OneModel(links, math.prod(shape), self.profiles).estimate(config)

    def fits(self, mode: str, shape: tuple[int, ...]) -> bool:
        """Return whether the model has enough heads: all other sizes divide."""
        heads = {"1d": shape[0]}.get(mode, shape[-1])
        return self.model["num_heads"] % heads == 0 and self.model["num_heads"] >= heads


# -- the claims -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Claim:
    """The claim of a paper: so much faster than 1D on 64 devices.

    Attributes:
        links: as near as data sheets come to the cluster of the paper: four devices in a host; FDR InfiniBand for a
            host of Frontera, EDR of Longhorn, two HDR cards of MeluXina. V100 stand for Frontera's Quadro RTX 5000.
    """

    mode: str
    ratio: float
    source: str
    links: Links
    precision: str = "fp32"


CLAIMS = (
    Claim("2d", 1.48, "Optimus 2104.05343", Links("v100", 4, 56e9 / 8 / 4)),
    Claim("2.5d", 1.38, "Tesseract 2105.14500", Links("a100", 4, 400e9 / 8 / 4)),
    Claim("3d", 2.32, "3D 2105.14450", Links("v100", 4, 100e9 / 8 / 4)),
)


def claims(study: Study, batches: Sequence[int]) -> None:
    rows = []
    for claim in CLAIMS:
        for batch in batches:
            base = study.step(claim.links, "1d", (64,), batch=batch, recompute="full")
            cells: list[str] = []
            for flags in (AGAIN, KEPT):
                estimate = study.step(
                    claim.links, claim.mode, SQUARES[claim.mode], batch=batch, recompute="full", **flags
                )
                cells += [f"{base.seconds / estimate.seconds:.2f}"]
            rows.append([claim.source, claim.mode, claim.ratio, batch, f"{base.seconds:.1f} s", *cells, claim.links])
    header = ("claim", "mode", "published", "batch", "1D's step", "here", "here, kept", "links assumed")
    common.print_table("times faster than 1D on 64 devices, full activation checkpointing, fp32", header, rows)


def memory(study: Study, batches: Sequence[int]) -> None:
    """Print how large a batch fits, and how fast that is."""
    rows: list[list[object]] = []
    links, of_1d = CLAIMS[0].links, 0.0
    for name, (mode, flags, _) in WAYS.items():
        fitting: dict[int, PlanEstimate] = {}
        for batch in batches:
            options = {**flags, **AGAIN} if mode != "1d" else flags
            estimate = study.step(links, mode, SQUARES[mode], batch=batch, recompute="full", **options)
            if estimate.memory.fullest.total > SMALL:
                break
            fitting[batch] = estimate
        if not fitting:
            rows.append([name, "none", "-", "-", "-"])
            continue
        batch, estimate = fitting.popitem()
        of_1d = of_1d or batch / estimate.seconds
        total, speed = byte_count(estimate.memory.fullest.total), batch / estimate.seconds
        rows.append([name, batch, total, f"{speed:.1f}", f"{speed / of_1d:.2f}"])
    header = ("mode", "largest batch", "memory", "sequences/s", "times 1D's")
    common.print_table(f"the largest batch that fits {byte_count(SMALL)} on 64 devices ({links})", header, rows)


# -- over ranks and links -------------------------------------------------------------------------------------


def over_ranks(study: Study, title: str, links: Links) -> Panel:
    """Return seconds of a step of each mode by ranks; 1D ends where each rank has one head."""
    lines: list[Line] = []
    table: dict[int, dict[str, float]] = {}
    for name, (mode, flags, shapes) in WAYS.items():
        points = []
        for shape in shapes:
            if study.fits(mode, shape):
                ranks = math.prod(shape)
                seconds = study.step(links, mode, shape, **flags).seconds
                points.append((math.log2(ranks), seconds))
                table.setdefault(ranks, {})[name] = seconds
        lines.append(Line(name, [x for x, _ in points], [y for _, y in points]))
    rows = [[ranks, *(_three(table[ranks].get(name)) for name in WAYS)] for ranks in sorted(table)]
    common.print_table(f"{title}: seconds of a step ({links})", ("ranks", *WAYS), rows)
    return Panel(f"{title}\n{links}", lines, "log2 of ranks", "seconds of a step", log_y=True)


def over_links(study: Study, title: str, device: str, on_a_host: int) -> Panel:
    """Compare the other modes with 1D on 64 ranks, by the network's speed."""
    gigabytes = [2.0**power for power in range(8)]
    ratios: dict[str, list[float]] = {name: [] for name in WAYS}
    for speed in gigabytes:
        links = Links(device, on_a_host, speed * 1e9)
        seconds = {
            name: study.step(links, mode, SQUARES[mode], **flags).seconds for name, (mode, flags, _) in WAYS.items()
        }
        for name, values in ratios.items():
            values.append(seconds["1D"] / seconds[name])
    where = f"64 {device.upper()}, hosts of {on_a_host}"
    rows = [[f"{speed:g}", *(f"{ratios[name][at]:.2f}" for name in WAYS)] for at, speed in enumerate(gigabytes)]
    common.print_table(f"{title}, {where}: times faster than 1D", ("GB/s", *WAYS), rows)
    x = [math.log2(speed) for speed in gigabytes]
    lines = [Line(name, x, values) for name, values in ratios.items()]
    return Panel(f"{title}\n{where}", lines, "log2 of GB/s of a device to other hosts", "times faster than 1D")


def _three(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.3g}"


def panels(papers: Study, llama: Study) -> Iterator[Panel]:
    ours, theirs = "Llama 3 70B, 64 x 4,096 tokens", "24 layers of 8,192, 64 x 512 tokens"
    yield over_ranks(papers, theirs, Links("v100", 4, 100e9 / 8 / 4))
    yield over_ranks(papers, theirs, Links("v100", 1, 100e9 / 8 / 4))
    yield over_ranks(llama, ours, Links("h100", 8, 50e9))
    yield over_ranks(llama, ours, Links("h100", 1, 12.5e9))
    yield over_links(papers, theirs, "v100", 4)
    yield over_links(llama, ours, "h100", 8)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw steps over ranks and links (.svg, .png, .pdf)")
    args = parser.parse_args(argv)
    papers = Study(PAPERS, 64, "fp32")
    claims(papers, (16, 32, 64, 128, 256))
    memory(papers, (16, 32, 64, 128, 256, 512, 1024))
    if args.plot is not None:
        save_charts(list(panels(papers, Study(LLAMA, 64, "bf16"))), args.plot)


if __name__ == "__main__":
    main()
