"""The command ``colossus launch``: it checks the config, starts the ranks or joins those that exist, and reports.

It imports no torch before the config is checked.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from colossus import machine
from colossus.arithmetic import counted
from colossus.checkpoint.weight_sources import describe_weights
from colossus.config import Config, ConfigError, state_config
from colossus.config.plan_head import as_lines, plan_head
from colossus.launch import run_folder, slurm
from colossus.launch.auto_plan import NodePlans, NodeRange, resolve_planned
from colossus.launch.checks import ModelInfo, check_data, check_devices, check_model, check_required, describe_device
from colossus.launch.decide import DONE, FAILED, USAGE
from colossus.launch.memory_folder import HOST_MEMORY
from colossus.launch.resume import Origin, choose
from colossus.launch.servers import describe_servers, num_servers
from colossus.launch.stop import LAUNCHER_PID
from colossus.launch.worker import run_worker


def run(
    config_path: str,
    overrides: list[str],
    *,
    nproc: int | None = None,
    run_dir: str | None = None,
    nnodes: tuple[int, int] = (1, 1),
    rdzv_endpoint: str | None = None,
    resume: bool = False,
    dry_run: bool = False,
    max_restarts: int | None = None,
) -> int:
    """Run a config file's training.

    Args:
        config_path: the config file.
        overrides: its overrides.
        nproc: the processes of each node; by default the product of the plan's sizes, shared out over the nodes.
        run_dir: the run folder, by default ``runs/<name>-<time>``.
        nnodes: the smallest and the largest number of nodes, on each of which this command runs.
        rdzv_endpoint: ``host:port`` of one of the nodes, at which they meet.
        resume: resume from the latest checkpoint, in its run folder (`resume.choose`).
        dry_run: print a description of the run and start nothing.
        max_restarts: the value of ``launch.restarts.max``.

    Returns:
        0 done, 1 failed at run time, 2 config or usage; 130 after SIGINT, 129 after SIGHUP, 143 after SIGTERM, SIGUSR1
        and SIGUSR2.
    """
    if max_restarts is not None:
        overrides = [*overrides, f"launch.restarts.max={max_restarts}"]
    try:
        if nnodes[1] > 1 and slurm.is_one_of_a_node(os.environ):
            joined, rdzv_endpoint = None, rdzv_endpoint or slurm.rendezvous_endpoint(os.environ)
        else:
            joined = worker_variables(os.environ)
        if joined is not None:
            if dry_run:
                raise ConfigError("--dry-run starts nothing: give it without torchrun or srun")
            return _join(config_path, overrides, joined, nproc, run_dir, resume)
        nodes = NodeRange(*nnodes)
        stated = state_config(config_path, overrides)
        planner = NodePlans(stated, nproc, nodes, rdzv_endpoint)
        (config, lines), local_ranks = planner.max_plan, planner.local_ranks
        find_origin = partial(choose, config, run_dir=run_dir, resume=resume)
        # with several nodes the first one looks, and which that is depends on the rendezvous
        origin = find_origin() if nodes.max_nodes == 1 or dry_run else None
        if origin is not None:
            origin.check()
        check_restart_keys(config)
        check_devices(config, local_ranks, nodes.max_nodes)
        model = check_model(config)
        check_data(config)
        if dry_run:
            print("\n".join([describe(config, model, origin, local_ranks, nodes.max_nodes), *lines[1:]]))
            return DONE
    except ConfigError as error:
        print(f"colossus: {error}", file=sys.stderr)
        return USAGE
    if lines:
        print("\n".join(lines), flush=True)
    _prepare_environment(local_ranks, nodes.max_nodes)
    try:
        # torch's elastic is imported here, since errors in the config do not need it
        from colossus.launch.agent import Job, run_attempts
        from colossus.launch.rendezvous import Rendezvous

        begin = origin.take if origin is not None else lambda: find_origin().take()
        rendezvous = None
        if nodes.max_nodes > 1:
            rendezvous = Rendezvous(rdzv_endpoint or "", nodes, config.launch.rejoin_seconds)
        return run_attempts(
            Job(planner.plan, stated, (config_path, *overrides), local_ranks, rendezvous), config, begin
        )
    except ConfigError as error:  # of the run folder, on the first node
        print(f"colossus: {error}", file=sys.stderr)
        return USAGE
    except (OSError, RuntimeError) as error:
        at = f" at {rdzv_endpoint}" if rdzv_endpoint else ""
        print(f"colossus: the processes could not be started{at}: {error}", file=sys.stderr)
        return FAILED


def worker_variables(environ: Mapping[str, str]) -> dict[str, str] | None:
    """Return torch's variables where torchrun or srun has started this process as one of the ranks, else None.

    Raises:
        ConfigError: SLURM's variables cannot be read, or mpirun has started this process as one of several.
    """
    needed = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    if all(name in environ for name in needed):
        return {name: environ[name] for name in (*needed, "LOCAL_WORLD_SIZE") if name in environ}
    if slurm.is_task(environ):
        return slurm.torch_variables(environ)
    for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE"):  # of Open MPI; of MPICH, Intel MPI
        if environ.get(name, "1") != "1":
            raise ConfigError(
                f"mpirun has started this command {environ[name]} times, as runs of their own ({name}): start it once, "
                f"without mpirun, with --nproc {environ[name]}; on several nodes once on each, with --nnodes and "
                f"--rdzv-endpoint; or set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT for each process"
            )
    return None


def _join(
    config_path: str, overrides: list[str], joined: dict[str, str], nproc: int | None, run_dir: str | None, resume: bool
) -> int:
    """Run the rank as which torchrun or srun has started this process, and return its exit code."""
    world_size = int(joined["WORLD_SIZE"])
    try:
        if nproc is not None and str(nproc) not in (joined["WORLD_SIZE"], joined.get("LOCAL_WORLD_SIZE")):
            raise ConfigError(f"--nproc {nproc}, but torchrun or srun has started {world_size}: leave --nproc out")
        local_ranks = int(joined.get("LOCAL_WORLD_SIZE") or int(joined["LOCAL_RANK"]) + 1)
        stated = state_config(config_path, overrides)
        config, lines = resolve_planned(stated, world_size, hosts=-(-world_size // local_ranks))
        check_required(config)
        check_devices(config, local_ranks, -(-world_size // local_ranks), environ=os.environ)
    except ConfigError as error:
        if joined["LOCAL_RANK"] == "0":  # one rank of each node, whose files may differ from those of the first node
            where = "" if joined["RANK"] == "0" else f" (rank {joined['RANK']} on {socket.gethostname()})"
            print(f"colossus: {error}{where}", file=sys.stderr)
        return USAGE
    if lines and joined["RANK"] == "0":
        print("\n".join(lines), flush=True)
    restarts = config.launch.restarts
    without_effect = {
        "launch.restarts": restarts is not None and restarts.max > 0,
        "checkpoint.memory_every": config.checkpoint.memory_every > 0,
    }
    if any(without_effect.values()) and joined["RANK"] == "0":
        keys = " and ".join(key for key, is_set in without_effect.items() if is_set)
        text = f"{keys}: without effect under torchrun and srun, which have restarts of their own"
        print(f"colossus: {text} (with checkpoint.resume=auto they continue)", file=sys.stderr)
    machine.raise_open_files()
    os.environ.update(joined)
    os.environ.setdefault("OMP_NUM_THREADS", os.environ.get("SLURM_CPUS_PER_TASK", "1"))
    return run_worker(lambda: config, run_dir=run_dir, resume=resume)


def check_restart_keys(config: Config) -> None:
    """Raise ConfigError for each key that would have no effect without a restart, or that this host cannot serve."""
    train, checkpoint, restarts = config.train, config.checkpoint, config.launch.restarts
    leaves_out = train.on_spike is not None and train.on_spike.action == "rollback"
    goes_back = {
        "train.on_mismatch = 'restart'": train.on_mismatch == "restart",
        "train.on_spike.action = 'rollback'": leaves_out,
    }
    keys = {f"checkpoint.memory_every = {checkpoint.memory_every}": checkpoint.memory_every > 0, **goes_back}
    asked = [key for key, is_asked in keys.items() if is_asked]
    problems = []
    if asked and (restarts is None or not restarts.max):
        problems += [f"{key} is for a restart by the launcher: set launch.restarts" for key in asked]
    if checkpoint.memory_every and not os.access(HOST_MEMORY, os.W_OK):
        problems.append(f"checkpoint.memory_every: this host has no {HOST_MEMORY} that can be written to")
    for key in [key for key, is_asked in goes_back.items() if is_asked and not checkpoint.every]:
        problems.append(f"{key} goes back to a checkpoint: set checkpoint.every")
    num_steps = (checkpoint.keep_last - 1) * checkpoint.every
    keeps_few = checkpoint.every and checkpoint.keep_last and not checkpoint.keep_every
    if train.on_mismatch == "restart" and keeps_few and num_steps < train.check_replicas_every:
        problems.append(
            f"train.on_mismatch = 'restart' goes back behind the last comparison that agreed, "
            f"train.check_replicas_every = {train.check_replicas_every} steps, and checkpoint.keep_last = "
            f"{checkpoint.keep_last} with checkpoint.every = {checkpoint.every} has checkpoints of the last "
            f"{num_steps} steps: keep more, or compare more often"
        )
    if leaves_out and train.batch_ramp is not None:
        problems.append("train.on_spike.action = 'rollback': batches of a batch_ramp cannot be left out")
    if problems:
        raise ConfigError(problems, config.source)


def _prepare_environment(local_ranks: int, nnodes: int) -> None:
    """Set the variables that the workers inherit, unless the user has set them."""
    machine.raise_open_files()
    os.environ[LAUNCHER_PID] = str(os.getpid())
    os.environ.setdefault("OMP_NUM_THREADS", str(machine.threads_per_rank(local_ranks)))
    # a print of a rank that is killed later must not be lost in a buffer
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")  # as torchrun does
    loopback = machine.loopback_interface()
    if nnodes == 1 and loopback is not None:
        # gloo fails where the host name resolves to an address of another machine
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)


@contextmanager
def contained(output: Path, *, with_errors: bool = False) -> Iterator[None]:
    """Run a launch inside another command: its output and that of its ranks goes to a new file.

    The variables that it sets for the ranks (threads, say) are restored afterwards.

    Args:
        output: the file.
        with_errors: whether standard error goes there, too.
    """
    descriptors = [1, 2] if with_errors else [1]
    duplicates, environment = [os.dup(descriptor) for descriptor in descriptors], dict(os.environ)
    _flush()
    try:
        with output.open("wb") as file:
            for descriptor in descriptors:
                os.dup2(file.fileno(), descriptor)
        yield
    finally:
        _flush()
        for descriptor, duplicate in zip(descriptors, duplicates, strict=True):
            os.dup2(duplicate, descriptor)
            os.close(duplicate)
        os.environ.clear()
        os.environ.update(environment)


def _flush() -> None:
    sys.stdout.flush()
    sys.stderr.flush()


# -- --dry-run --------------------------------------------------------------------------------------------------


def describe(config: Config, model: ModelInfo | None, origin: Origin | None, local_ranks: int, nnodes: int) -> str:
    """Return the plan, processes, device, model and batch of a run as aligned lines, before a process is started."""
    where = f" on each of {nnodes} nodes" if nnodes > 1 else ""
    threads = f"{counted(machine.threads_per_rank(local_ranks), 'thread')} each, {machine.usable_cores()} cores here"
    parameters = "not known before the model is built"
    if model is not None:
        on_rank = "" if model.num_local_parameters is None else f", {model.num_local_parameters:,} on rank 0"
        parameters = f"{model.num_parameters:,} in the model{on_rank}"
    rows = [*plan_head(config).items(), ("processes", f"{local_ranks}{where}, {threads}")]
    if servers := num_servers(config, nnodes):
        rows.append(("servers", describe_servers(servers, nnodes)))
    rows += [("device", describe_device(config, local_ranks)), ("parameters", parameters)]
    for number, stage in enumerate(model.stages if model is not None else ()):
        rows.append(("" if number else "stages", stage.removeprefix("stage ")))
    rows += [("" if at else "groups", line) for at, line in enumerate(model.group_rules if model is not None else ())]
    rows.append(("steps", f"{config.train.steps}, {config.train.precision.name}, seed {config.train.seed}"))
    if origin is not None:
        rows.append(("run folder", str(origin.folder or run_folder.default_folder(config.name or "run"))))
        if origin.is_own or origin.checkpoint is not None:
            rows.append(("resumes", origin.describe()))
        if (weights := origin.find_weights()) is not None:
            rows.append(("weights", describe_weights(weights)))
    return f"nothing was started (--dry-run)\n{as_lines(rows)}"
