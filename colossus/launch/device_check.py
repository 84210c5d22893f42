"""Whether there is a device for each rank of this machine, before a process is started."""

from __future__ import annotations

import os
from collections.abc import Mapping

from colossus.config import Config, ConfigError, model_options
from colossus.config.sizes import describe_processes, suggestions
from colossus.context.visible_devices import counted, explain_visible, may_be_of_one_rank


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
    plans = suggestions(config, model_options(config), found * nnodes, fits=True)
    ways = [f"more machines (--nnodes {-(-local_ranks * nnodes // found)})"] if not local_ranks * nnodes % found else []
    ways += ["ranks that share a device (comm.backend='gloo'), to try things out", "or device='cpu'"]
    raise ConfigError(f"{what}{plans}\n  or keep the plan with {', '.join(ways)}", config.source)
