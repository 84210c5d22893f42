"""What is checked before a process starts, beside the data: schedule, model, weights, devices."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from colossus.checkpoint.errors import CheckpointError
from colossus.checkpoint.matching import ModelTensor, match_weights
from colossus.checkpoint.weight_sources import manifest_of
from colossus.config import Config, ConfigError, model_options
from colossus.config.plans import describe_processes, suggestions
from colossus.context.visible_devices import counted, explain_visible, may_be_of_one_rank
from colossus.hf.family import family_of
from colossus.registry import MODELS, STRATEGIES
from colossus.schedule.build import make_schedule

# -- schedule and model ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ModelInfo:
    """Number of parameters of the model and of rank 0's shards of it, and a line for each pipeline stage.

    What rank 0 holds is None where the run decides it, which looks at the data first (owners of tables).
    """

    num_parameters: int
    num_local_parameters: int | None
    stages: tuple[str, ...] = ()


def check_schedule(config: Config) -> None:
    """Make the schedule and check it, without torch.

    Raises:
        ConfigError: naming the first action that is wrong.
    """
    schedule = config.schedule
    try:
        make_schedule(schedule.type, config.parallel.pipeline.size, schedule.microbatches, **schedule.options)
    except ValueError as error:
        raise ConfigError([f"schedule: {error}"], config.source) from error


def check_model(config: Config) -> ModelInfo | None:
    """Build rank 0's shards of the model on the meta device, under a context that connects to no other rank.

    Returns:
        None when the config has no model, or when its constructor fails for another reason than a size or an option:
        the ranks raise that with a traceback.

    Raises:
        ConfigError: for what the layers refuse, and for stages that cannot be cut out of the model.
    """
    check_schedule(config)
    # torch is imported here, once the config is known to be right in itself: it takes seconds
    from colossus.construct.build_model import build
    from colossus.context.parallel_context import ParallelContext
    from colossus.engine.checkpointed_modules import with_activation_checkpoint
    from colossus.layout.parameter import num_parameters
    from colossus.schedule.pipeline import PipelineRuntime
    from colossus.sparse.table_optimizers import require_optimizer_of_tables
    from colossus.sparse.tables import survey

    if config.model is None:
        return None
    spec = config.model.spec()
    total = 0
    try:
        context = ParallelContext.from_config(config, connect=False)
        pipeline = PipelineRuntime(config, context)
        strategy = STRATEGIES.build(config.parallel.data_strategy)

        def cut(model: object) -> None:
            nonlocal total
            total = num_parameters(model)  # type: ignore[arg-type]
            tables = survey(model, context)  # type: ignore[arg-type]
            try:
                require_optimizer_of_tables(config.optimizer, bool(tables.untied), is_given=False)
                strategy.check_tables(tables)
            except ValueError as error:
                raise ConfigError(str(error)) from error
            pipeline.split(model)  # type: ignore[arg-type]
            strategy.prepare(model, context)

        factory = with_activation_checkpoint(lambda: MODELS.build(spec), config.train.activation_checkpoint)
        model = build(factory, context, materialize=False, prepare=cut)
    except ConfigError as error:
        raise ConfigError(error.problems, config.source) from None
    except ValueError as error:
        raise ConfigError([f"the model cannot be built under this plan: {error}"], config.source) from error
    except Exception:
        return ModelInfo(total, None) if total else None
    held = sum(parameter.numel() for parameter in model.parameters())
    stages = pipeline.partition.describe() if pipeline.partition is not None else []
    return ModelInfo(total, held, tuple(stages))


# -- weights --------------------------------------------------------------------------------------------------


def check_weights(config: Config, folder: Path) -> None:
    """Refuse what the ranks would refuse of ``checkpoint.weights``, where the names of the parameters are known.

    Args:
        folder: in which they were found.

    Raises:
        ConfigError: what is missing, left over, of another shape.
    """
    known, weights = _parameters(config), config.checkpoint.weights
    if known is None or weights is None:
        return
    try:
        manifest = manifest_of(folder)
        match_weights(
            known, manifest.shapes("model"), manifest.aliases, only=weights.only, rename=weights.rename,
            grow=weights.grow, shorten=getattr(model_options(config), "positions_by_row", ()), strict=weights.strict,
        )  # fmt: skip
    except CheckpointError as error:
        raise ConfigError(f"checkpoint.weights = {weights.path!r}: {error}") from None


def _parameters(config: Config) -> dict[str, ModelTensor] | None:
    """The parameters of the model, where it is one that Hugging Face has, too."""
    options = model_options(config)
    if config.model is None or options is None:
        return None
    try:
        family = family_of(config.model.type, options)
    except CheckpointError:
        return None
    others: dict[str, list[str]] = {}
    for alias, first in family.aliases(options).items():
        others.setdefault(first, []).append(alias)
    parts = [part for tensor in family.tensors(options) for part in tensor.parts]
    return {part.name: ModelTensor(part.shape, (part.name, *others.get(part.name, ()))) for part in parts}


# -- devices --------------------------------------------------------------------------------------------------


def is_on_cuda(config: Config) -> bool:
    import torch

    return config.device == "cuda" or (config.device == "auto" and torch.cuda.is_available())


def describe_device(config: Config, local_ranks: int) -> str:
    """``cuda (4 of 8 devices), backend nccl`` or ``cpu, backend gloo``."""
    from colossus.context.world import choose_backend

    if not is_on_cuda(config):
        return f"cpu, backend {choose_backend(config.comm.backend, 'cpu')}"
    import torch

    found = torch.cuda.device_count()
    shared = f", shared by {local_ranks} ranks" if local_ranks > found else ""
    backend = choose_backend(config.comm.backend, "cuda")
    return f"cuda ({min(local_ranks, found)} of {found} devices{shared}), backend {backend}"


def ranks_may_share(config: Config) -> bool:
    """Whether several ranks may compute on one device: NCCL refuses that, gloo does not."""
    return config.comm.backend == "gloo"


def check_device(config: Config) -> None:
    """Refuse a device that this machine does not have.

    Raises:
        ConfigError: naming what to use instead.
    """
    if config.device != "cuda" and config.comm.backend != "nccl":
        return
    import torch

    has_cuda = torch.cuda.is_available()
    if config.comm.backend == "nccl" and (config.device == "cpu" or not (has_cuda or config.device == "cuda")):
        why = "device = 'cpu'" if config.device == "cpu" else "torch finds none here"
        raise ConfigError(
            f"comm.backend = 'nccl' joins CUDA devices, but {why}; use comm.backend='auto' or 'gloo'", config.source
        )
    if not has_cuda:
        raise ConfigError(no_cuda_device(), config.source)


def no_cuda_device() -> str:
    """``device = 'cuda', but ..``: why there is none, as far as can be seen."""
    import torch

    if torch.version.cuda is None and torch.version.hip is None:
        reason = f"torch {torch.__version__} is built without CUDA: install its build for CUDA"
    else:
        reason = explain_visible(os.environ, 0) or "`nvidia-smi` shows what the driver finds"
    return f"device = 'cuda', but torch finds no CUDA device here ({reason}); use device='auto' or 'cpu'"


def check_devices(
    config: Config, local_ranks: int, nnodes: int = 1, *, environ: Mapping[str, str] | None = None
) -> None:
    """Refuse a plan that has more ranks on this machine than it has devices.

    Args:
        local_ranks: of this machine.
        nnodes: machines of the run, with as many ranks and devices.
        environ: of a rank that torchrun or srun has started, which may be shown one device of its own; None before
            any is started.

    Raises:
        ConfigError: with the devices, and the nearest plans for as many.
    """
    check_device(config)
    if not is_on_cuda(config) or ranks_may_share(config):
        return
    import torch

    found = torch.cuda.device_count()
    if local_ranks <= found or (environ is not None and found == 1 and may_be_of_one_rank(environ)):
        return
    where = "this machine" if nnodes == 1 else f"each of {nnodes} machines"
    note = explain_visible(os.environ, found)
    what = f"device: {describe_processes(local_ranks)} on {where}, but {counted(found)} here{note and f' ({note})'}"
    what += f": --nproc {found} is the most, and a plan of as many processes"
    plans = suggestions(config, model_options(config), found * nnodes)
    ways = [f"more machines (--nnodes {-(-local_ranks * nnodes // found)})"] if not local_ranks * nnodes % found else []
    ways += ["ranks that share a device (comm.backend='gloo'), to try things out", "or device='cpu'"]
    raise ConfigError(f"{what}{plans}\n  or keep the plan with {', '.join(ways)}", config.source)
