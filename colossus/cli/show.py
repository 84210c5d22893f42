"""``colossus show``: print the ranks, the pipeline schedule and other facts of a plan. No process is started."""

from __future__ import annotations

import argparse
import importlib
import itertools
import shutil

from colossus.arithmetic import aligned, counted
from colossus.cli.parser import OVERRIDES, Parser, load, size_argument
from colossus.config import Config, ConfigError
from colossus.config.errors import as_config_errors
from colossus.config.plan_head import as_lines, plan_head
from colossus.config.plans import name_of
from colossus.context.grid import PUBLIC_NAMES, RankGrid, build_grid
from colossus.launch.checks import check_model
from colossus.launch.servers import describe_servers, num_servers
from colossus.picture import FORMATS
from colossus.schedule.actions import placement
from colossus.schedule.build import make_schedule
from colossus.schedule.draw import draw, save, summary
from colossus.schedule.simulate import Times, simulate

#: the most groups of an axis and ranks of the table that are printed
_MOST_GROUPS, _MOST_RANKS = 4, 64


def make_parser() -> Parser:
    parser = Parser(
        "colossus show",
        "Print the coordinates of every rank and the groups along each axis, for a plan of any size. No process is\n"
        "started. The options print something else instead:\n"
        "  --timeline  the pipeline schedule over time, with the bubble and the activations of each rank\n"
        "  --graph     the replicas that each replica sends to in each step, and how fast they reach consensus\n"
        "  --strategy  the bytes sent for each table (sparse=True) and for the other parameters\n"
        "  --layers    how each module of the model is split, and the traffic that this saves\n"
        "  --lr        the learning rate of each step, and the batch if it grows\n"
        "  --memory    the memory of each pipeline rank by kind; --limit says whether it fits a device",
        OVERRIDES + "\nexamples:\n  colossus show config.py parallel.tensor.mode=2.5d parallel.tensor.size=8 "
        "parallel.tensor.depth=2 --nproc 4096\n"
        "  colossus show config.py --timeline parallel.pipeline=4 schedule.type=zb-h1 schedule.microbatches=8\n"
        "  colossus show config.py --timeline timeline.svg   # a picture, too; needs the extra: colossus[plot]\n"
        "  colossus show config.py --graph parallel.data=8 parallel.strategy.type=sgp\n"
        "  colossus show config.py --strategy parallel.data=8 parallel.strategy=hybrid\n"
        "  colossus show config.py --layers parallel.tensor=2\n"
        "  colossus show config.py --lr lr_schedule.type=wsd lr_schedule.warmup_steps=100\n"
        "  colossus show config.py --memory --limit 80GB parallel.pipeline=4 schedule.microbatches=8\n",
    )
    parser.add_file()
    parser.add_nproc("processes of the run (default: WORLD_SIZE under torchrun, else the product of the sizes)")
    parser.add_argument("--all", action="store_true", help=f"print every rank of a plan of more than {_MOST_RANKS}")
    help_text = f"draw the pipeline schedule over time, with OUT also into this file ({', '.join(FORMATS)})"
    parser.add_path("--timeline", "OUT", help_text, nargs="?", const="")
    parser.add_path("--lr", "OUT", "draw the learning rate by step, with OUT also into this file", nargs="?", const="")
    parser.add_argument("--graph", action="store_true", help="print the peers of a gossip strategy by step")
    parser.add_argument("--strategy", action="store_true", help="print what the data-parallel strategy sends")
    parser.add_argument("--layers", action="store_true", help="print what each module of the model became")
    parser.add_argument("--memory", action="store_true", help="print the predicted memory of the ranks, by kind")
    help_text = "with --memory: say whether the plan fits a device of this size (80GB)"
    parser.add_argument("--limit", type=size_argument, metavar="SIZE", help=help_text)
    parser.add_argument("--json", action="store_true", help="with --memory: print JSON, in bytes")
    return parser


def run(arguments: argparse.Namespace) -> int:
    for name in ("timeline", "lr"):
        if "=" in (getattr(arguments, name) or ""):  # argparse took an override for the value of this option
            arguments.overrides.append(getattr(arguments, name))
            setattr(arguments, name, "")
    if (arguments.limit or arguments.json) and not arguments.memory:
        raise ConfigError("--limit and --json are options of --memory: add --memory")
    config = load(arguments)
    if arguments.graph:
        graphs = importlib.import_module("colossus.cli.show_graph")  # imports numpy, which is slow
        print(graphs.render_graph(config))
    elif arguments.strategy:
        parameters = importlib.import_module("colossus.cli.show_strategy")  # imports torch, which is slow
        print(parameters.render_strategy(config))
    elif arguments.layers:
        layers = importlib.import_module("colossus.cli.show_layers")
        print(layers.render_layers(config))
    elif arguments.memory:
        memory = importlib.import_module("colossus.cli.show_memory")
        print(memory.render_memory(config, arguments.limit, as_json=arguments.json))
    elif arguments.lr is not None:
        rates = importlib.import_module("colossus.cli.show_lr")
        print(rates.render_learning_rates(config, shutil.get_terminal_size((100, 24)).columns, arguments.lr))
    elif arguments.timeline is None:
        print(render(config, every_rank=arguments.all))
    else:
        print(render_timeline(config, shutil.get_terminal_size((100, 24)).columns, arguments.timeline))
    return 0


def render(config: Config, every_rank: bool = False) -> str:
    """Return the plan of a resolved config: its arithmetic, batch, parameters, groups by axis, a table of the ranks."""
    grid = build_grid(config.parallel)
    return "\n\n".join([_head(config), _groups(grid), _rank_table(grid, every_rank)])


def render_timeline(config: Config, width: int, picture: str | None = None) -> str:
    """Return the pipeline schedule of a resolved config over time, with its bubble and activations.

    The unit of time is the forward of all stages of a rank. A backward takes 2, its dgrad and wgrad 1 each, a transfer
    0.

    Args:
        config: the config.
        width: columns at most.
        picture: a file to draw it into as well.

    Raises:
        ConfigError: the schedule is wrong (its first bad action is named), or the picture cannot be drawn.
    """
    stages, schedule = config.parallel.pipeline.size, config.schedule
    with as_config_errors("schedule", config.source):
        actions = make_schedule(schedule.type, stages, schedule.microbatches, **schedule.options)
        num_stages = len(placement(actions))
        share = stages / num_stages
        simulation = simulate(actions, Times(share, 2 * share, share, share))
        name = name_of(schedule.type)
        count = f"{num_stages} stages on {counted(stages, 'rank')}" if num_stages > 1 else "1 stage"
        title = f"{name}, {count}, {counted(schedule.microbatches, 'microbatch', 'es')}"
    if picture:
        try:
            save(simulation, picture, title)
        except (ValueError, OSError) as error:
            raise ConfigError(f"--timeline: {error}") from error
    head = f"schedule    {title}\n"
    head += "time        in forwards of a rank; a backward takes 2, each half of it 1, a transfer 0"
    sections = [head, draw(simulation, width), summary(simulation), *([f"drawn in {picture}"] if picture else [])]
    return "\n\n".join(sections)


def _head(config: Config) -> str:
    rows = {**plan_head(config), "model": _model(config)}
    if servers := num_servers(config, 1):
        rows["servers"] = describe_servers(servers, 1)
    return f"{config.name}\n{as_lines(rows)}"


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
    """Return a line for each axis with more than one rank: its first groups, and the number of groups."""
    axis_names = dict.fromkeys(name for public in PUBLIC_NAMES for name in (public, *grid.public[public]))
    names = [name for name in axis_names if grid.size(name) > 1]
    if not names:
        return "groups      none: one rank has no neighbours"
    width = max(map(len, names))
    lines = ["groups"]
    for name in names:
        axes, count = grid.axes(name), grid.world_size // grid.size(name)
        ranges = [range(1 if axis in axes else min(size, _MOST_GROUPS)) for axis, size in grid.sizes.items()]
        points = itertools.islice(itertools.product(*ranges), _MOST_GROUPS)
        leaders = [grid.rank(dict(zip(grid.names, point, strict=True))) for point in points]
        more = f"  ... {count} groups" if count > len(leaders) else ""
        lines.append(f"  {name:<{width}}  " + "  ".join(f"[{_ranks(grid, rank, name)}]" for rank in leaders) + more)
    return "\n".join(lines)


def _ranks(grid: RankGrid, leader: int, name: str) -> str:
    """Return the ranks of the group whose lowest rank is ``leader``; of a large group the first two and the last."""
    if grid.size(name) <= 4:
        return " ".join(map(str, grid.group(leader, name)))
    axes = [axis for axis in grid.axes(name) if grid.sizes[axis] > 1]
    strides = {axis: grid.rank({**dict.fromkeys(grid.names, 0), axis: 1}) for axis in axes}
    last = leader + sum(strides[axis] * (grid.sizes[axis] - 1) for axis in axes)
    return f"{leader} {leader + strides[axes[-1]]} .. {last}"


def _rank_table(grid: RankGrid, every_rank: bool) -> str:
    num_rows = grid.world_size if every_rank else min(grid.world_size, _MOST_RANKS)
    rows = [[str(rank), *map(str, grid.coordinates(rank).values())] for rank in range(num_rows)]
    more = grid.world_size - num_rows
    return aligned([["rank", *grid.names], *rows]) + (f"\n({more:,} more ranks; --all prints them)" if more else "")
