"""``colossus show``: who is where, and what runs when, as text. No process is started, so any plan can be drawn."""

from __future__ import annotations

import argparse
import importlib
import itertools
import shutil
from collections.abc import Sequence

from colossus.arithmetic import aligned, counted, factors
from colossus.cli.parser import OVERRIDES, Parser, load
from colossus.config import Config, ConfigError, model_options
from colossus.config.plans import name_of, strategy_options
from colossus.config.sizes import describe_processes, describe_sizes, describe_zero, world_size
from colossus.context.grid import PUBLIC_NAMES, RankGrid, build_grid
from colossus.launch.preflight import check_model
from colossus.launch.servers import describe_servers, num_servers
from colossus.picture import FORMATS
from colossus.schedule.actions import placement
from colossus.schedule.build import make_schedule
from colossus.schedule.draw import draw, save, summary
from colossus.schedule.simulate import Times, simulate

MANY = 64
ENDS = (16, 4)  # ranks printed from the start and from the end of a long table


def make_parser() -> Parser:
    parser = Parser(
        "show",
        "Print who is where: for every rank its coordinate on every axis, and the groups along each axis.\n"
        "Works for any plan, of any size, in any tensor mode; nothing is started. With --timeline, what each rank of\n"
        "the pipeline does when, its bubble and the activations it holds, for any schedule. With --graph, which\n"
        "replica sends to which in each step, with what weight, and how fast that brings replicas together. With\n"
        "--strategy, which way the gradient of each table (sparse=True) takes, and what all of them would send.",
        OVERRIDES + "\nexamples:\n  colossus show config.py parallel.tensor.mode=2.5d parallel.tensor.size=8 "
        "parallel.tensor.depth=2 --nproc 4096\n"
        "  colossus show config.py --timeline parallel.pipeline=4 schedule.type=zb-h1 schedule.microbatches=8\n"
        "  colossus show config.py --timeline timeline.svg   # a picture, too; needs the extra: colossus[plot]\n"
        "  colossus show config.py --graph parallel.data=8 parallel.strategy.type=sgp\n"
        "  colossus show config.py --strategy parallel.data=8 parallel.strategy=hybrid\n",
    )
    parser.add_file()
    parser.add_nproc("processes of the run (default: WORLD_SIZE under torchrun, else the product of the sizes)")
    parser.add_argument("--all", action="store_true", help="print every rank of a plan of more than 64")
    parser.add_argument(
        "--timeline",
        nargs="?",
        const="",
        metavar="OUT",
        help=f"draw the pipeline schedule over time; with OUT ({', '.join(FORMATS)}) into this file, too",
    )
    parser.add_argument(
        "--graph",
        action="store_true",
        help="print the graph of a gossip strategy: peers by step, contraction, steps to consensus",
    )
    parser.add_argument(
        "--strategy",
        action="store_true",
        help="print what the data-parallel strategy does with each parameter, and the bytes that it sends",
    )
    return parser


def run(arguments: argparse.Namespace) -> int:
    config = load(arguments)
    if arguments.graph:
        graphs = importlib.import_module("colossus.cli.show_graph")  # numpy takes its time
        print(graphs.render_graph(config))
    elif arguments.strategy:
        parameters = importlib.import_module("colossus.cli.show_strategy")  # torch takes its time
        print(parameters.render_strategy(config, shutil.get_terminal_size((100, 24)).columns))
    elif arguments.timeline is None:
        print(render(config, every_rank=arguments.all))
    else:
        print(render_timeline(config, shutil.get_terminal_size((100, 24)).columns, arguments.timeline))
    return 0


def render(config: Config, every_rank: bool = False) -> str:
    """The plan of a resolved config: arithmetic, batch, parameters, groups by axis, and a table of the ranks."""
    grid = build_grid(config.parallel)
    sections = [_head(config, grid), _groups(grid), _rank_table(grid, every_rank)]
    return "\n\n".join(sections)


def render_timeline(config: Config, width: int, picture: str | None = None) -> str:
    """The pipeline schedule of a resolved config over time, and what it costs; drawn into ``picture``, too, if given.

    Times are in forwards of all stages of a rank: a backward takes 2, its dgrad and wgrad 1 each, a transfer 0.

    Raises:
        ConfigError: for a schedule that is wrong, naming its first bad action, and for a picture that cannot be drawn.
    """
    stages, schedule = config.parallel.pipeline.size, config.schedule
    try:
        actions = make_schedule(schedule.type, stages, schedule.microbatches, **schedule.options)
        num_stages = len(placement(actions))
        share = stages / num_stages
        simulation = simulate(actions, Times(share, 2 * share, share, share))
        name = name_of(schedule.type)
        count = f"{num_stages} stages on {counted(stages, 'rank')}" if num_stages > 1 else "1 stage"
        title = f"{name}, {count}, {counted(schedule.microbatches, 'microbatch', 'es')}"
    except ValueError as error:
        raise ConfigError(f"schedule: {error}", config.source) from error
    if picture:
        try:
            save(simulation, picture, title)
        except (ValueError, OSError) as error:
            raise ConfigError(f"--timeline: {error}") from error
    head = [
        f"schedule    {title}",
        "time        in forwards of a rank; a backward takes 2, each half of it 1, a transfer 0",
    ]
    alike = world_size(config.parallel) // stages
    if alike > 1 and stages > 1:
        head.append(f"rank        of the pipeline axis; each stands for {alike} processes")
    sections = ["\n".join(head), draw(simulation, width), summary(simulation)]
    return "\n\n".join([*sections, f"drawn in {picture}"] if picture else sections)


def _head(config: Config, grid: RankGrid) -> str:
    parallel = config.parallel
    assert parallel.data is not None
    tensor = parallel.tensor
    kind = ""
    if tensor.size > 1:
        axes = factors({axis: grid.sizes[axis] for axis in grid.public["tensor"]})
        kind = f" (tensor mode {tensor.mode}{'' if grid.public['tensor'] == ('tensor',) else ': ' + axes})"
    if parallel.sequence.size > 1:
        kind += f" (sequence mode {parallel.sequence.mode})"
    if parallel.zero.stage:
        kind += f" ({describe_zero(parallel)})"
    batch, microbatches = config.train.global_batch_size, config.schedule.microbatches
    samples = getattr(model_options(config), "samples", "sequences")
    each = batch // (parallel.data * microbatches)
    lines = [
        f"plan        {describe_sizes(parallel)} = {describe_processes(world_size(parallel))}{kind}",
        f"rank order  {', '.join(parallel.rank_order)} (outermost first)",
        f"batch       {batch} {samples} = data {parallel.data} x microbatches {microbatches} x {each}",
        f"model       {_model(config)}",
    ]
    of_strategy = strategy_options(config)
    if of_strategy is not None and (promise := of_strategy.describe(parallel.data)):
        lines.append(f"strategy    {name_of(parallel.strategy.type)} ({promise})")
    if servers := num_servers(config, 1):
        lines.append(f"servers     {describe_servers(servers, 1)}")
    if config.train.activation_checkpoint.type != "none":
        lines.append(f"recomputed  {config.train.activation_checkpoint}")
    return "\n".join([str(config.name), *lines])


def _model(config: Config) -> str:
    if config.model is None:
        return "none in the config"
    kind = config.model.type
    name = kind if isinstance(kind, str) else getattr(kind, "__qualname__", type(kind).__qualname__)
    built = check_model(config)
    if built is None:
        return f"{name} (its parameters are known when it is built)"
    text = f"{name}, {built.num_parameters:,} parameters"
    if built.num_local_parameters in (None, built.num_parameters):
        return text
    is_alike = config.parallel.pipeline.size == 1 and config.parallel.zero.stage < 3
    return f"{text}, {built.num_local_parameters:,} on {'each rank' if is_alike else 'rank 0'}"


def _groups(grid: RankGrid) -> str:
    """One line per axis with more than one rank: how many groups, and the first ones."""
    names = [name for public in PUBLIC_NAMES for name in dict.fromkeys([public, *grid.public[public]])]
    names = [name for name in names if grid.size(name) > 1]
    if not names:
        return "groups      none: one rank has no neighbours"
    width = max(map(len, names))
    lines = ["groups"]
    for name in names:
        count = grid.world_size // grid.size(name)
        first = [_ranks(grid, rank, name) for rank in _first_leaders(grid, name, min(4, count))]
        more = f"  ... {count} groups" if count > len(first) else ""
        lines.append(f"  {name:<{width}}  " + "  ".join(f"[{ranks}]" for ranks in first) + more)
    return "\n".join(lines)


def _first_leaders(grid: RankGrid, name: str, most: int) -> list[int]:
    """The lowest ranks of the first groups along ``name``."""
    axes = grid.axes(name)
    ranges = [range(1 if axis in axes else min(size, most)) for axis, size in grid.sizes.items()]
    points = itertools.islice(itertools.product(*ranges), most)
    return [grid.rank(dict(zip(grid.names, point, strict=True))) for point in points]


def _ranks(grid: RankGrid, leader: int, name: str) -> str:
    """The group whose lowest rank is ``leader``; only a small one is listed."""
    if grid.size(name) <= 4:
        return " ".join(map(str, grid.group(leader, name)))
    axes = [axis for axis in grid.axes(name) if grid.sizes[axis] > 1]
    strides = {axis: grid.rank({**dict.fromkeys(grid.names, 0), axis: 1}) for axis in axes}
    even = all(strides[outer] == strides[inner] * grid.sizes[inner] for outer, inner in itertools.pairwise(axes))
    step = strides[axes[-1]]
    last = leader + sum(strides[axis] * (grid.sizes[axis] - 1) for axis in axes)
    return f"{leader}-{last}" if even and step == 1 else f"{leader} {leader + step} .. {last}"


def _rank_table(grid: RankGrid, every_rank: bool) -> str:
    ranks: Sequence[int | None] = range(grid.world_size)
    note = ""
    if grid.world_size > MANY and not every_rank:
        first, last = ENDS
        ranks = [*ranks[:first], None, *ranks[-last:]]
        note = f"\n({grid.world_size - first - last} ranks left out; --all prints them)"
    header = ["rank", *grid.names]
    rows = [
        ["..."] * len(header) if rank is None else [str(rank), *map(str, grid.coordinates(rank).values())]
        for rank in ranks
    ]
    return aligned([header, *rows]) + note
