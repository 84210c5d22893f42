"""The checks before a process starts: schedule, model, weights, data, devices. No torch until it is needed."""

from __future__ import annotations

import os
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import colossus
from colossus.arithmetic import counted
from colossus.checkpoint.adapter_names import plain_names
from colossus.checkpoint.errors import CheckpointError
from colossus.checkpoint.matching import match_weights
from colossus.checkpoint.weight_sources import manifest_of
from colossus.config import Config, ConfigError, Named, model_options
from colossus.config.components import options_of
from colossus.config.errors import as_config_errors
from colossus.config.plans import suggestions
from colossus.context.visible_devices import counted_devices, explain_visible, may_be_of_one_rank
from colossus.hf.family import family_of
from colossus.registry import HOOKS, MODELS, STRATEGIES
from colossus.schedule.build import make_schedule

if TYPE_CHECKING:
    from colossus.data.loader import Loaders

#: the number of a dataset's samples that are checked
_SAMPLES = 16


def check_required(config: Config) -> None:
    """Raise ConfigError unless a config that is launched by itself names a model and data, and what its hooks need."""
    lines = {"model": "model = dict(type='GPT', ...), or your own class", "data": "data = dict(type='PythonStdlib')"}
    missing = [f"{key}: the config has none: {line}" for key, line in lines.items() if getattr(config, key) is None]
    for number, hook in enumerate(config.hooks):
        options = options_of(f"hooks.{number}", hook, HOOKS) if isinstance(hook, Named) else None
        if options is not None:
            missing += [f"hooks.{number}: {hook.type} {problem}" for problem in options.problems(config)]
    if missing:
        raise ConfigError(missing, config.source)


# -- schedule and model ---------------------------------------------------------------------------------------


class ModelInfo(NamedTuple):
    """The facts of a model under a plan.

    Attributes:
        num_parameters: the parameters of the whole model.
        num_local_parameters: the parameters of rank 0's shards; None where a constructor's error hides them.
        stages: a line for each pipeline stage.
        group_rules: a line for each pattern of ``optimizer.groups``.
    """

    num_parameters: int
    num_local_parameters: int | None
    stages: tuple[str, ...] = ()
    group_rules: tuple[str, ...] = ()


def check_model(config: Config) -> ModelInfo | None:
    """Build rank 0's shards of the model on the meta device, under a context that connects to no other rank.

    Returns:
        None where the config has no model, or its constructor fails for another reason than a size or an option; the
        ranks raise such an error with a traceback.

    Raises:
        ConfigError: a layer, the partition into stages, the schedule or the optimizer refuses its options.
    """
    schedule = config.schedule
    with as_config_errors("schedule", config.source):
        make_schedule(schedule.type, config.parallel.pipeline.size, schedule.microbatches, **schedule.options)
    # torch is imported here, after the checks that do not need it, since that takes seconds
    from colossus.construct.build_model import build
    from colossus.context.parallel_context import ParallelContext
    from colossus.engine.checkpointed_modules import with_activation_checkpoint
    from colossus.engine.loss_spikes import require_one_loss
    from colossus.engine.optimizers import require_options
    from colossus.engine.parameter_groups import make_groups
    from colossus.layout.parameter import num_parameters
    from colossus.layout.split_parameter import local_shape
    from colossus.schedule.pipeline import PipelineRuntime
    from colossus.sparse.table_optimizers import require_optimizer_of_tables
    from colossus.sparse.tables import survey

    spec = None if config.model is None else config.model.spec()
    total, rules = 0, list[str]()
    try:
        context = ParallelContext.from_config(config, connect=False)
        require_options(config.optimizer)
        if spec is None:
            return None
        pipeline = PipelineRuntime(config, context)
        strategy = STRATEGIES.build(config.parallel.data_strategy)

        def cut(model: object) -> None:
            nonlocal total
            total = num_parameters(model)  # type: ignore[arg-type]
            if (groups := make_groups(config.optimizer, model)) is not None:  # type: ignore[arg-type]
                rules.extend(groups.description)
            tables = survey(model, context)  # type: ignore[arg-type]
            with as_config_errors():
                require_optimizer_of_tables(config.optimizer, bool(tables.untied), is_custom=False)
                strategy.check_tables(tables)
                if config.train.on_spike is not None:
                    require_one_loss(strategy)
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
    num_local = sum(local_shape(parameter).numel() for parameter in model.parameters())
    stages = pipeline.partition.describe() if pipeline.partition is not None else []
    return ModelInfo(total, num_local, tuple(stages), tuple(rules))


# -- weights --------------------------------------------------------------------------------------------------


def check_weights(config: Config, folder: Path, key: str = "checkpoint.weights") -> None:
    """Raise ConfigError where ``checkpoint.weights`` do not fit the model, if the model has a Hugging Face family.

    Args:
        config: the config of the run.
        folder: the folder of the weights.
        key: their key, for messages.
    """
    options, weights = model_options(config), config.checkpoint.weights
    if config.model is None or options is None or weights is None:
        return
    try:
        family = family_of(config.model.type, options)
    except CheckpointError:
        return
    shapes = {part.name: part.shape for tensor in family.tensors(options) for part in tensor.parts}
    names = {name: [name] for name in shapes}
    for alias, first in family.aliases(options).items():
        names.get(first, []).append(alias)
    try:
        manifest = manifest_of(folder, weights.average)
        if plain_names(manifest.shapes("model")):  # with adapters, which the family has not: the ranks compare
            return
        match_weights(
            shapes, names, manifest.shapes("model"), manifest.aliases, only=weights.only, rename=weights.rename,
            grow=weights.grow, shorten=getattr(options, "positions_by_row", ()), strict=weights.strict,
        )  # fmt: skip
    except CheckpointError as error:
        raise ConfigError(f"{key} = {weights.path!r}: {error}") from None


# -- data -----------------------------------------------------------------------------------------------------


def check_data(config: Config) -> Loaders | None:
    """Make the data of the first data rank as the ranks will, check some of its samples, and return the loaders.

    After an error in a user's own data code it returns None: the ranks will raise that error with its traceback.

    Raises:
        ConfigError: our own code refuses the data: a missing file, options, sizes, ids beyond the vocabulary.
    """
    from colossus.data.make_loaders import loaders_of

    try:
        loaders = loaders_of(config, config.data, data_rank=0, data_size=config.parallel.data or 1, device="cpu")
        for part in (loaders.train, loaders.validation):
            if part is not None:
                _check_samples(getattr(part.source, "dataset", None), model_options(config))
    except Exception as error:
        if isinstance(error, ValueError) and is_ours(error):
            raise ConfigError(f"data: {str(error).removeprefix('data: ')}", config.source) from error
        return None
    return loaders


def is_ours(error: BaseException) -> bool:
    """Return whether an error was raised by this package, and not by a user's own code."""
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and Path(frames[-1].filename).is_relative_to(Path(colossus.__file__).parent)


def _check_samples(dataset: Any, options: Any) -> None:
    """Check some samples of a dataset whose samples are read by number; a stream is not read."""
    from colossus.data.batch import to_tensors
    from colossus.data.model_input import model_input
    from colossus.data.tokens import TokenWindows
    from colossus.nest import tensors
    from colossus.random import GLOBAL_RNG

    vocab_size, check = getattr(options, "vocab_size", None), getattr(options, "check_sample", None)
    if dataset is None or (vocab_size is None and check is None):
        return
    if isinstance(dataset, TokenWindows) and check is None:
        dataset.check_ids()
        return
    for number in range(min(_SAMPLES, len(dataset))):
        name = f"sample {number} of {type(dataset).__name__}"
        with GLOBAL_RNG.preserved():
            sample = to_tensors(dataset[number])
        inputs = list(tensors(model_input(sample)))
        inputs = [(where, x) for where, x in inputs if where == "['ids']"] or inputs  # beside documents and positions
        if check is not None:
            of_dict = sample.get("labels") if isinstance(sample, dict) else None
            labels: Any = sample[-1] if isinstance(sample, tuple) else of_dict
            is_label = isinstance(labels, int) or getattr(labels, "ndim", None) == 0
            for where, x in inputs:
                for problem in check(tuple(x.shape), int(labels) if is_label else None):
                    raise ValueError(f"{name} {where}{problem}")
        if vocab_size is not None:
            _check_ids(name, inputs, vocab_size)


def _check_ids(name: str, inputs: list[tuple[str, Any]], vocab_size: int) -> None:
    kinds = {x.dtype for _, x in inputs}
    if kinds and all(kind.is_floating_point for kind in kinds):
        raise ValueError(
            f"{name} has inputs of {', '.join(map(str, kinds))}, but the model takes token ids, integers from 0 to "
            f"{vocab_size - 1}"
        )
    for where, ids in inputs:
        if str(ids.dtype) not in ("torch.int64", "torch.int32") or not ids.numel():
            continue
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= vocab_size:
            raise ValueError(
                f"{name} has the token id {low if low < 0 else high} in its inputs{where}, but model.vocab_size = "
                f"{vocab_size} (ids 0..{vocab_size - 1}): set model.vocab_size to {high + 1} or more, or check the data"
            )


# -- devices --------------------------------------------------------------------------------------------------


def is_on_cuda(config: Config) -> bool:
    import torch

    return config.device == "cuda" or (config.device == "auto" and torch.cuda.is_available())


def describe_device(config: Config, local_ranks: int) -> str:
    """Return a text on device and backend: ``cuda (4 of 8 devices), backend nccl`` or ``cpu, backend gloo``."""
    import torch

    from colossus.context.world import choose_backend

    if not is_on_cuda(config):
        return f"cpu, backend {choose_backend(config.comm.backend, 'cpu')}"
    num_devices = torch.cuda.device_count()
    shared = f", shared by {local_ranks} ranks" if local_ranks > num_devices else ""
    backend = choose_backend(config.comm.backend, "cuda")
    return f"cuda ({min(local_ranks, num_devices)} of {num_devices} devices{shared}), backend {backend}"


def ranks_may_share(config: Config) -> bool:
    """Return whether several ranks may compute on one device, which gloo allows and NCCL does not."""
    return config.comm.backend == "gloo"


def check_devices(
    config: Config, local_ranks: int, nnodes: int = 1, *, environ: Mapping[str, str] | None = None
) -> None:
    """Raise ConfigError for a device that this machine lacks, or more ranks than it has devices.

    Args:
        config: the config of the run.
        local_ranks: the ranks of this machine.
        nnodes: the number of machines, each with as many ranks and devices.
        environ: the environment of a rank that torchrun or srun has started, which may see only its own device; None
            before ranks are started.
    """
    device, backend = config.device, config.comm.backend
    if device == "cpu" and backend != "nccl":
        return
    import torch

    has_cuda = torch.cuda.is_available()
    if backend == "nccl" and (device == "cpu" or not (has_cuda or device == "cuda")):
        why = "device = 'cpu'" if device == "cpu" else "torch finds none here"
        raise ConfigError(
            f"comm.backend = 'nccl' joins CUDA devices, but {why}; use comm.backend='auto' or 'gloo'", config.source
        )
    if device == "cuda" and not has_cuda:
        reason = explain_visible(os.environ, 0) or "`nvidia-smi` shows what the driver finds"
        if torch.version.cuda is None and torch.version.hip is None:
            reason = f"torch {torch.__version__} is built without CUDA: install its build for CUDA"
        raise ConfigError(
            f"device = 'cuda', but torch finds no CUDA device here ({reason}); use device='auto' or 'cpu'",
            config.source,
        )
    num_devices = torch.cuda.device_count()
    if not has_cuda or ranks_may_share(config) or local_ranks <= num_devices:
        return
    if environ is not None and num_devices == 1 and may_be_of_one_rank(environ):
        return
    where = "this machine" if nnodes == 1 else f"each of {nnodes} machines"
    note = explain_visible(os.environ, num_devices)
    plans = suggestions(config, model_options(config), num_devices * nnodes)
    raise ConfigError(
        f"device: {counted(local_ranks, 'process', 'es')} on {where}, but {counted_devices(num_devices)} here"
        f"{note and f' ({note})'}: --nproc {num_devices} is the most, and a plan of as many processes{plans}\n  or "
        f"keep the plan with more machines (--nnodes), ranks that share a device (comm.backend='gloo'), to try things "
        f"out, or device='cpu'",
        config.source,
    )
