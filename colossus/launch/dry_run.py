"""What ``colossus launch --dry-run`` prints: everything that is known before a process is started."""

from __future__ import annotations

from colossus.arithmetic import factors
from colossus.checkpoint.sources import describe_weights
from colossus.config import Config, model_options
from colossus.config.sizes import describe_zero
from colossus.context.grid import PUBLIC_NAMES, build_grid
from colossus.launch import run_folder
from colossus.launch.device_check import describe_device
from colossus.launch.model_check import ModelInfo
from colossus.launch.origin import Origin
from colossus.launch.server_plan import describe_servers, num_servers
from colossus.machine import threads_per_rank, usable_cores


def describe(config: Config, model: ModelInfo | None, origin: Origin | None, local_ranks: int, nnodes: int) -> str:
    """The plan, processes, device, model and batch as aligned lines."""
    parallel, train = config.parallel, config.train
    grid = build_grid(parallel)
    sizes = {name: grid.size(name) for name in parallel.rank_order if name in PUBLIC_NAMES}
    modes = [
        f"{name} mode {section.mode}"
        for name, section in (("tensor", parallel.tensor), ("sequence", parallel.sequence))
        if section.size > 1
    ]
    modes += filter(None, [describe_zero(parallel)])
    mode = f" ({', '.join(modes)})" if modes else ""
    where = f" on each of {nnodes} nodes" if nnodes > 1 else ""
    threads = f"{threads_per_rank(local_ranks)} thread(s) each, {usable_cores()} cores here"
    rows = {
        "plan": f"{factors(sizes)} = {grid.world_size} processes{mode}",
        "processes": f"{local_ranks}{where}, {threads}",
        **({"servers": describe_servers(servers, nnodes)} if (servers := num_servers(config, nnodes)) else {}),
        "device": describe_device(config, local_ranks),
        "parameters": _parameters(model),
        "batch": _batch(config),
        "steps": f"{train.steps}, {train.precision.name}, seed {train.seed}",
        **({"recomputed": str(train.activation_checkpoint)} if train.activation_checkpoint.type != "none" else {}),
    }
    if origin is not None:
        rows["run folder"] = str(origin.folder or run_folder.default_folder(config.name or "run"))
        if origin.is_own or origin.checkpoint is not None:
            rows["resumes"] = origin.describe()
        if (weights := origin.find_weights()) is not None:
            rows["weights"] = describe_weights(weights)
    lines = [f"{key:<11} {value}" for key, value in rows.items()]
    number = list(rows).index("parameters") + 1
    cut = [line.removeprefix("stage ") for line in (model.stages if model is not None else ())]
    stages = [f"{'stages' if not number else '':<11} {line}" for number, line in enumerate(cut)]
    return "\n".join(["nothing was started (--dry-run)", *lines[:number], *stages, *lines[number:]])


def _parameters(model: ModelInfo | None) -> str:
    if model is None:
        return "not known before the model is built"
    held = "" if model.num_local_parameters is None else f", {model.num_local_parameters:,} on rank 0"
    return f"{model.num_parameters:,} in the model{held}"


def _batch(config: Config) -> str:
    batch, data, microbatches = config.train.global_batch_size, config.parallel.data or 1, config.schedule.microbatches
    each = batch // data // microbatches
    samples = getattr(model_options(config), "samples", "sequences")
    return f"{batch} {samples} per step: {data} data rank(s) x {microbatches} microbatch(es) x {each}"
