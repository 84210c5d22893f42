"""Pictures of the pages, drawn from what the code computes: grids of ranks, layouts, graphs, schedules, bytes, memory.

``python docs/make_pictures.py`` writes them into ``docs/static``, where they are checked in, so that GitHub shows them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from colossus.config import load_config
from colossus.context.grid import build_grid
from colossus.graphs.graph import make_graph
from colossus.layout.activation import Activation
from colossus.layout.layout import Layout
from colossus.picture import new_figure
from colossus.registry import TENSOR_MODES
from colossus.schedule.actions import placement
from colossus.schedule.build import make_schedule
from colossus.schedule.simulate import Times, simulate
from colossus.sequence_parallel.mask import Mask
from colossus.sequence_parallel.modes import zigzag_order
from colossus.tensor_parallel.choose_sharding import Shardings
from colossus.tensor_parallel.mode import MatmulSharding
from colossus.tensor_parallel.traffic import matmul_traffic

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "static"
COLOURS = ("#9ecae1", "#fdae6b", "#a1d99b", "#bcbddc", "#fa9fb5", "#c7e9c0", "#fdd0a2", "#d9d9d9")
DARK = "#333333"


def drawings() -> dict[str, str]:
    """Return the pictures that need no matplotlib: file name -> SVG."""
    draws = (plan, weights, pair, reshard, graphs, zigzag, masks, forms_of_weights, host_and_device)
    pictures = {f"{draw.__name__.replace('_', '-')}.svg": draw() for draw in draws}
    return pictures | {f"timeline-{kind}.svg": timeline(kind) for kind in ("1f1b", "zb-h1", "zb-v")}


def write(folder: Path) -> None:
    """Write all pictures of this file into a folder."""
    for name, text in drawings().items():
        (folder / name).write_text(text)
    with plain_svg():
        bytes_by_mode(folder / "bytes-by-mode.svg")
        memory_by_stage(folder / "memory-by-stage.svg")
    for name in ("bytes-by-mode", "memory-by-stage"):
        shorten(folder / f"{name}.svg")


def plain_svg() -> Any:
    """Return a context in which matplotlib writes text as text, and the same bytes each time."""
    import matplotlib

    return matplotlib.rc_context(
        {"svg.fonttype": "none", "svg.hashsalt": "colossus", "font.sans-serif": ["DejaVu Sans"]}
    )


def shorten(path: Path) -> None:
    """Round the coordinates of an SVG to two decimals and drop its metadata."""
    text = re.sub(r"<metadata>.*?</metadata>|<\?xml.*?\?>|<!DOCTYPE.*?>", "", path.read_text(), flags=re.S)
    text = re.sub(r"(\d+\.\d{2})\d+", r"\1", text)
    path.write_text(re.sub(r"\s*\n\s*", "\n", text).lstrip())


# -- SVG ------------------------------------------------------------------------------------------------------------


def _svg(width: float, height: float, shapes: Iterable[str]) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" '
        f'height="{height:g}" font-family="Helvetica, Arial, sans-serif" fill="{DARK}">'
    )
    arrow = (
        '<defs><marker id="arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
        f'orient="auto-start-reverse"><path d="M0,0 L8,4 L0,8 z" fill="{DARK}"/></marker></defs>'
    )
    return "\n".join(
        [head, arrow, f'<rect width="{width:g}" height="{height:g}" fill="white"/>', *shapes, "</svg>", ""]
    )


def _rect(x: float, y: float, width: float, height: float, fill: str, text: str = "") -> str:
    """Return a box with a text in its middle."""
    box = f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" fill="{fill}" stroke="{DARK}"/>'
    return box + (_text(x + width / 2, y + height / 2 + 4, text) if text else "")


def _text(x: float, y: float, text: str, anchor: str = "middle") -> str:
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" font-size="12">{text}</text>'


def _line(x1: float, y1: float, x2: float, y2: float, both: bool = False) -> str:
    start = ' marker-start="url(#arrow)"' if both else ""
    ends = f'x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"'
    return f'<line {ends} stroke="{DARK}" stroke-width="1.2"{start} marker-end="url(#arrow)"/>'


# -- ranks of a plan ------------------------------------------------------------------------------------------------


def plan() -> str:
    """Draw the ranks of ``configs/gpt_stdlib_3d.py``: a row for each replica, a column for each stage."""
    config = load_config(ROOT / "configs" / "gpt_stdlib_3d.py")
    grid = build_grid(config.parallel)
    replicas, stages, ways = grid.size("data"), grid.size("pipeline"), grid.size("tensor")
    cell, gap, row, left, top = 84, 96, 104, 100, 56
    width = ways * cell
    shapes = []
    for rank in range(grid.world_size):
        at = grid.coordinates(rank)
        x = left + at["pipeline"] * (width + gap) + at["tensor"] * cell
        shapes.append(_rect(x, top + at["data"] * row, cell, 56, COLOURS[at["tensor"]], f"rank {rank}"))
    for replica in range(replicas):
        y = top + replica * row + 28
        shapes.append(_text(left - 16, y + 4, f"replica {replica}", "end"))
        for stage in range(stages - 1):
            x = left + (stage + 1) * width + stage * gap
            shapes += [_line(x + 4, y, x + gap - 4, y, both=True), _text(x + gap / 2, y - 9, "activations")]
    for stage in range(stages):
        x = left + stage * (width + gap) + width / 2
        shapes += [_text(x, 30, f"stage {stage}"), _line(x, top + 60, x, top + row - 4, both=True)]
        shapes.append(_text(x + 10, top + 84, "gradients", "start"))
    bottom = top + replicas * row - 14
    sizes = f"data {replicas} x pipeline {stages} x tensor {ways} = {grid.world_size} processes"
    shapes.append(_text(left, bottom, f"{sizes}; a colour is a half of each weight", "start"))
    return _svg(left + stages * width + (stages - 1) * gap + 24, bottom + 22, shapes)


# -- which rank holds what ------------------------------------------------------------------------------------------


def _shardings(mode: str, shape: tuple[int, ...], sequence_sharded: bool = False) -> Shardings:
    kind = TENSOR_MODES.get(mode)
    sizes = dict(zip(kind.axes, shape, strict=True))
    return Shardings.of(kind, Activation(), sizes, sequence_sharded=sequence_sharded, keep=True)


def _shards(x: float, title: str, layout: Layout, shape: tuple[int, int], sizes: Mapping[str, int]) -> list[str]:
    """Draw a matrix of this shape in pixels, cut into the boxes of a layout, each with the ranks that store it."""
    holders: dict[Any, list[int]] = {}
    for rank in range(math.prod(sizes.values())):
        rest, at = rank, {}
        for name in reversed(list(sizes)):
            rest, at[name] = divmod(rest, sizes[name])
        holders.setdefault(layout.box(shape, sizes, at), []).append(rank)
    shapes = [_text(x + shape[1] / 2, 26, title)]
    for number, (((top, bottom), (left, right)), ranks) in enumerate(sorted(holders.items())):
        colour, label = COLOURS[number % len(COLOURS)], " ".join(map(str, ranks))
        shapes.append(_rect(x + left, 40 + top, right - left, bottom - top, colour, label))
    return shapes


def weights() -> str:
    """Draw the weight of a column linear under each mode."""
    shapes: list[str] = []
    modes = (("1D, 8 ranks", "1d", (8,)), ("2D, 2 x 2", "2d", (2, 2)), ("2.5D, 2 x 2 x 2", "2.5d", (2, 2, 2)))
    for place, (title, mode, sizes) in enumerate((*modes, ("3D, 2 x 2 x 2", "3d", (2, 2, 2)))):
        shardings = _shardings(mode, sizes)
        shapes += _shards(24 + 184 * place, title, shardings.column[0].weight, (160, 160), shardings.sizes)
    return _svg(24 + 184 * 4, 224, shapes)


def pair() -> str:
    """Draw a column and a row linear in 1D on four ranks: inputs, weights and outputs."""
    shardings = _shardings("1d", (4,))
    whole, inner = shardings.regions.whole.at(2), shardings.regions.inner.at(2)
    column, row = shardings.column[0].weight, shardings.row[0].weight
    items = [("x", whole, (120, 80)), ("up.weight", column, (120, 80)), ("up(x)", inner, (120, 120))]
    shapes, x = [], 24
    for title, layout, shape in (*items, ("down.weight", row, (80, 120)), ("down(up(x))", whole, (120, 80))):
        shapes += _shards(x, title, layout, shape, shardings.sizes)
        x += shape[1] + 40
    return _svg(x, 184, shapes)


def reshard() -> str:
    """Draw a weight as one plan saved it and as two others read it."""
    shapes: list[str] = []
    plans = (("saved: 1D, 2 ranks", "1d", (2,)), ("read: 2D, 2 x 2", "2d", (2, 2)))
    for place, (title, mode, sizes) in enumerate((*plans, ("read: 3D, 2 x 2 x 2", "3d", (2, 2, 2)))):
        shardings = _shardings(mode, sizes)
        shapes += _shards(24 + 220 * place, title, shardings.column[0].weight, (150, 150), shardings.sizes)
        shapes += [_line(220 * place - 40, 115, 220 * place + 16, 115)] if place else []
    return _svg(640, 210, shapes)


def zigzag() -> str:
    """Draw the tiles of causal attention and their ranks: 4 ring ranks, 8 chunks of the sequence."""
    ring, chunks, cell = 4, 8, 28
    owner = {chunk: place // 2 for place, chunk in enumerate(zigzag_order(chunks, ring))}
    shapes = []
    for query in range(chunks):
        y = 20 + query * cell
        shapes.append(_text(258, y + 18, f"chunk {query}: rank {owner[query]}", "start"))
        shapes += [_rect(24 + key * cell, y, cell, cell, COLOURS[owner[query]]) for key in range(query + 1)]
    for rank in range(ring):
        tiles = sum(query + 1 for query in range(chunks) if owner[query] == rank)
        shapes.append(_rect(400, 20 + rank * 56, 140, 40, COLOURS[rank], f"rank {rank}: {tiles} of 36 tiles"))
    return _svg(564, 264, shapes)


def masks() -> str:
    """Draw which keys (columns) each query (row) attends to, by the ranges of positions that masks are."""
    causal, cell, size = Mask.causal(), 14, 8
    drawn = [
        ("causal", causal, [0] * 8),
        ("window(3)", Mask.window(3), [0] * 8),
        ("window(2, 1)", Mask.window(2, 1), [0] * 8),
        ("causal & chunk(4)", causal & Mask.chunk(4), [0] * 8),
        ("prefix(4)", Mask.prefix(4), [0] * 8),
        ("causal, documents", causal, [0, 0, 0, 1, 1, 1, 1, 2]),
    ]
    shapes: list[str] = []
    for place, (title, mask, documents) in enumerate(drawn):
        left = 20 + 140 * place
        shapes.append(_text(left + cell * size / 2, 18, title))
        for query in range(size):
            seen = range(mask.first(query), min(mask.last(query), size - 1) + 1)
            for key in range(size):
                sees = key in seen and documents[key] == documents[query]
                colour = COLOURS[documents[query]] if sees else "#ffffff"
                shapes.append(_rect(left + key * cell, 30 + query * cell, cell, cell, colour))
    return _svg(20 + 140 * len(drawn), 160, shapes)


def graphs() -> str:
    """Draw the graphs along which eight replicas send."""
    shapes: list[str] = []
    drawn = [("exponential", 0), ("exponential", 1), ("exponential", 2), ("ring", 0), ("bipartite_exponential", 0)]
    for place, (name, step) in enumerate(drawn):
        graph, left = make_graph(name, 8, 1), 90 + 172 * place
        shapes.append(_text(left, 24, f"{name}, step {step}"))
        spots = [(left + 58 * math.sin(math.pi * i / 4), 108 - 58 * math.cos(math.pi * i / 4)) for i in range(8)]
        for index, (x, y) in enumerate(spots):
            circle = f'<circle cx="{x:.1f}" cy="{y:.1f}" r="11" fill="{COLOURS[0]}" stroke="{DARK}"/>'
            shapes += [circle, _text(x, y + 4, str(index))]
            for to, _ in graph.at(step).targets(index):
                to_x, to_y = spots[to]
                cut = 13 / math.hypot(to_x - x, to_y - y)
                dx, dy = cut * (to_x - x), cut * (to_y - y)
                shapes.append(_line(x + dx, y + dy, to_x - dx, to_y - dy))
    return _svg(90 + 172 * 4 + 90, 190, shapes)


def forms_of_weights() -> str:
    """Draw the forms of weights and the calls that turn one into another."""
    boxes = {"Hugging Face folder": (24, 60), "engine, any plan": (290, 60), "checkpoint": (556, 60)}
    shapes = [_rect(x, y, 150, 50, COLOURS[0], title) for title, (x, y) in boxes.items()]
    shapes += [
        _rect(290, 180, 150, 50, COLOURS[2], "torch module"),
        *(_line(176, 85, 288, 85, both=True), _text(232, 76, 'type="hf"'), _text(232, 104, "hf.save")),
        *(_line(442, 85, 554, 85, both=True), _text(498, 76, "save"), _text(498, 104, "resume")),
        *(_line(365, 112, 365, 178), _text(374, 150, "colossus.plain", "start")),
        *(_line(631, 112, 442, 204), _text(570, 180, "read_state_dict", "start")),
        *(_line(631, 50, 99, 50), _text(365, 40, "colossus checkpoint convert --to hf")),
    ]
    return _svg(730, 250, shapes)


def host_and_device() -> str:
    """Draw how the host prepares a step while the device computes the one before."""
    shapes = []
    for y, name, start, length in ((24, "host", 0, 60), (84, "device", 40, 150)):
        shapes.append(_text(80, y + 22, name, "end"))
        shapes += [_rect(96 + start + n * 150, y, length, 36, COLOURS[n], f"step {n}") for n in range(4)]
    return _svg(760, 144, shapes)


# -- schedules ------------------------------------------------------------------------------------------------------

#: kind of action -> its colour, its name
KINDS = {
    "forward": ("#9ecae1", "forward"),
    "backward": ("#fdae6b", "backward"),
    "backward_input": ("#fdae6b", "gradients of inputs"),
    "backward_weight": ("#a1d99b", "gradients of weights"),
}


def timeline(kind: str) -> str:
    """Draw a schedule on four ranks with eight microbatches; a number is a microbatch."""
    actions = make_schedule(kind, 4, 8)
    stages = len(placement(actions))
    share = 4 / stages
    simulation = simulate(actions, Times(share, 2 * share, share, share))
    left, top, row, width = 56, 40, 30, 680
    scale = width / simulation.makespan
    title = f"{kind}: {stages} stages on 4 ranks, 8 microbatches, idle {100 * simulation.bubble:.0f} % of the time"
    shapes, kinds = [_text(left, 24, title, "start")], {}
    for rank, spans in enumerate(simulation.spans):
        y = top + rank * row
        shapes.append(_text(left - 8, y + 16, f"rank {rank}", "end"))
        shapes.append(f'<rect x="{left}" y="{y}" width="{width}" height="24" fill="#eeeeee"/>')
        for span in spans:
            if span.action.kind not in KINDS:
                continue
            kinds[span.action.kind] = None
            x, length = left + span.start * scale, (span.end - span.start) * scale
            opacity = 1 if span.action.stage < 4 else 0.6
            shapes.append(
                f'<rect x="{x:.1f}" y="{y}" width="{length:.1f}" height="24" fill="{KINDS[span.action.kind][0]}" '
                f'fill-opacity="{opacity}" stroke="white"/>'
            )
            shapes.append(f'<text x="{x + length / 2:.1f}" y="{y + 16}" text-anchor="middle" font-size="10">'
                          f"{span.action.microbatch}</text>")  # fmt: skip
    x = float(left)
    for name in kinds:
        shapes += [
            _rect(x, top + 4 * row + 6, 12, 12, KINDS[name][0]),
            _text(x + 18, top + 4 * row + 16, KINDS[name][1], "start"),
        ]
        x += 150
    if stages > 4:
        shapes.append(_text(x + 18, top + 4 * row + 16, "pale: the second stage of a rank", "start"))
    return _svg(left + width + 24, top + 4 * row + 30, shapes)


# -- matplotlib -----------------------------------------------------------------------------------------------------


def _block(mode: str, shape: tuple[int, ...], sequence_sharded: bool) -> tuple[float, float]:
    """Return the MB in bf16 that a rank sends for a transformer block, and stores of an activation between blocks."""
    hidden, batch, tokens = 4096, 8, 1024
    shardings = _shardings(mode, shape, sequence_sharded)
    elements = 0.0
    for split, width, out in (("column", hidden, 3), ("row", hidden, 1), ("column", hidden, 4), ("row", 4 * hidden, 1)):
        sharding = shardings.choose(split, width, {"": out * hidden})
        assert isinstance(sharding, MatmulSharding)
        x, y = shardings.default_layouts(split)
        traffic = matmul_traffic(sharding, x, y, (batch, tokens, width), out * hidden, shardings.sizes)
        elements += traffic.step(1, keep=True, weights="microbatch").elements
    stored = math.prod(shardings.regions.residual.at(3).chunk((batch, tokens, hidden), shardings.sizes))
    return 2 * elements / 1e6, 2 * stored / 1e6


def bytes_by_mode(path: Path) -> None:
    """Draw what a rank sends for a block and stores between blocks under each mode, by the number of ranks."""
    sizes = (2, 4, 8, 16, 32, 64)
    lines: dict[str, list[tuple[str, tuple[int, ...], bool]]] = {
        "1D, sequence_sharded": [("1d", (p,), True) for p in sizes],
        "1D": [("1d", (p,), False) for p in sizes],
        "2D": [("2d", (q, q), False) for q in (2, 4, 8)],
        "2.5D, depth 2": [("2.5d", (2, q, q), False) for q in (2, 4)],
        "3D": [("3d", (q, q, q), False) for q in (2, 4)],
    }
    figure = new_figure(10, 3.6)
    axes = figure.subplots(1, 2)
    for (name, cases), style in zip(lines.items(), ("-s", ":o", "-D", "-^", "-v"), strict=True):
        ranks = [math.prod(shape) for _, shape, _ in cases]
        for axis, values in zip(axes, zip(*(_block(*case) for case in cases), strict=True), strict=True):
            axis.plot(ranks, values, style, label=name, linewidth=1.4, markersize=4)
    for axis, what in zip(axes, ("sent per rank and block", "activation between blocks, per rank"), strict=True):
        axis.set_xscale("log", base=2)
        axis.set_xticks(sizes, map(str, sizes))
        axis.set_xlabel("tensor ranks")
        axis.set_title(f"{what}, MB", fontsize=10, loc="left")
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
    axes[0].legend(fontsize=8)
    figure.savefig(path)


def memory_by_stage(path: Path) -> None:
    """Draw the peak memory of eight data ranks under each stage of ZeRO: a GPT of 24 layers, fp32, AdamW."""
    hidden, layers, vocabulary, ranks = 1024, 24, 50304, 8
    block, root = 4 * 12 * hidden**2, 4 * vocabulary * hidden
    whole = layers * block + root
    rows = whole / ranks
    parts = {
        "parameters": [whole, whole, whole, root + 2 * block + rows],
        "gradients": [whole, whole, whole, root + block + rows],
        "optimizer state": [2 * whole, 2 * rows, 2 * rows, 2 * rows],
    }
    figure = new_figure(8, 3.2)
    axis = figure.subplots()
    bottom = [0.0] * 4
    for (name, numbers), colour in zip(parts.items(), COLOURS, strict=False):
        heights = [number / 2**30 for number in numbers]
        axis.bar(range(4), heights, bottom=bottom, color=colour, label=name, width=0.6)
        bottom = [below + height for below, height in zip(bottom, heights, strict=True)]
    axis.set_xticks(range(4), ["no ZeRO", "stage 1", "stage 2", "stage 3"])
    axis.set_ylabel("GiB per rank, peak")
    axis.set_title(f"{whole / 4e6:.0f} M parameters on {ranks} data ranks, fp32, AdamW", fontsize=10, loc="left")
    axis.legend(fontsize=8)
    figure.savefig(path)


if __name__ == "__main__":
    import toolbox_pictures

    toolbox_pictures.write(FOLDER)
    write(FOLDER)
