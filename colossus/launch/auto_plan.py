"""What of a plan is chosen before the processes of a launch start: ``parallel = "auto"``, stages of equal time, and the
plan of a run that goes on with fewer processes.

Whoever needs it searches for it: the launcher of each node, which hands it to its ranks; under torchrun and srun every
rank. It follows from the config, the devices and the hardware alone, so all find the same plan, and ranks compare
their configs before the first step. No torch for a config that names its plan.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from pydantic import BaseModel

from colossus.arithmetic import byte_count, counted, parse_bytes
from colossus.config import Config, ConfigError, load_config
from colossus.config.plans import describe_plan, world_size
from colossus.hardware.hardware import Hardware
from colossus.hardware.named_hardware import default_hosts, named_hardware, typical_cpu
from colossus.launch.checks import check_given, is_on_cuda
from colossus.launch.fitted_plan import fit_plan

if TYPE_CHECKING:
    from colossus.planner.plan_estimate import PlanEstimate
    from colossus.planner.search_result import SearchResult

#: keys of ``parallel`` that no search varies
_NOT_SIZES = ("auto", "strategy", "rank_order")


class Planned(NamedTuple):
    """A resolved config, the overrides that make it of its file, and what to tell of a plan that was chosen."""

    config: Config
    overrides: list[str]
    told: list[str]


def load_planned(path: str, overrides: Sequence[str], nproc: int | None = None, *, hosts: int | None = None) -> Planned:
    """`load_config`, and a plan for a config that leaves it open, or whose own is for more processes than there are.

    Args:
        nproc: processes of the whole run.
        hosts: over which they are spread; None: as few as have eight devices each, of CPUs one.

    Raises:
        ConfigError: see `load_config`; and where no plan fits, or nothing is known of the hardware.
    """
    words, told = list(overrides), list[str]()

    def choose(config: Config) -> Config:
        if config.parallel.auto is None:
            fitted, changes, lines = (config, [], []) if nproc is None else fit_plan(config, nproc)
            words.extend(changes)
            told.extend(lines)
            return fitted
        best, lines = _choose(config, nproc, hosts)
        words.extend(["parallel.auto=None", *best.overrides])
        told.extend(lines)
        return best.config

    config = load_config(path, overrides, nproc, choose=choose)
    if config.parallel.pipeline.split == "time" and config.parallel.pipeline.size > 1:
        config, stated = _with_stated_split(config, hosts)
        words.extend(stated)
    return Planned(config, words, told)


def _choose(config: Config, nproc: int | None, hosts: int | None) -> tuple[PlanEstimate, list[str]]:
    """The best plan, and what to tell of it."""
    check_given(config)
    auto = config.parallel.auto
    assert auto is not None
    if nproc is None:
        raise ConfigError("parallel.auto: for how many processes is the plan? give --nproc")
    opened, keep = left_open(config)
    try:
        hardware, hosts = _hardware_of(config, nproc, hosts)
        memory = hardware.memory_bytes if auto.memory is None else parse_bytes(auto.memory)
        search = importlib.import_module("colossus.planner.search").search  # torch takes its time
        found: SearchResult = search(opened, hardware, devices=nproc, hosts=hosts, memory=memory, top=1, keep=keep)
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"parallel.auto: {error}") from error
    if found.stopped:
        raise KeyboardInterrupt
    if not found.plans:
        least, lacking = found.nearest, found.nothing_fits(nproc, memory)
        assert least is not None
        raise ConfigError(
            f"parallel.auto: {lacking}:\n  {' '.join(least.overrides)}\n"
            f"  more processes, a smaller batch or a smaller model need less on each"
        )
    best = found.plans[0]
    told = [
        f"plan        {describe_plan(best.config)}: the best of {found.tried:,} for {counted(nproc, 'process', 'es')}",
        f"predicted   {best.seconds:.3g} s a step, {byte_count(best.memory.fullest.total)} on the fullest rank; "
        f"{hardware.name}",
    ]
    return best, told


def left_open(config: Config) -> tuple[Config, dict[str, Any]]:
    """A config whose plan is to be chosen as one with any plan, and what of that is to stay."""
    parallel = config.parallel
    more = {} if parallel.auto is None else parallel.auto.keep
    opened = config.model_copy(update={"parallel": parallel.model_copy(update={"auto": None})})
    return opened, {**_given(parallel), **more}


def _given(section: BaseModel) -> dict[str, Any]:
    """The keys of a plan that a config gives, nested."""
    found = {}
    for key in section.model_fields_set.difference(_NOT_SIZES):
        value = getattr(section, key)
        found[key] = _given(value) if isinstance(value, BaseModel) else value
    return found


def _hardware_of(config: Config, nproc: int, hosts: int | None) -> tuple[Hardware, int]:
    """What the plan is for, and on how many hosts."""
    auto = config.parallel.auto
    if auto is not None and auto.hardware is not None:
        hardware = named_hardware(auto.hardware)
    elif is_on_cuda(config):
        import torch

        hardware = named_hardware(torch.cuda.get_device_name(0))
    else:
        hardware = typical_cpu(-(-nproc // (hosts or 1)))
    return hardware, hosts or default_hosts(hardware, nproc)


def _with_stated_split(config: Config, hosts: int | None) -> tuple[Config, Sequence[str]]:
    """Of a plan whose stages are to be equal in time, with an override that says the number of blocks of each."""
    check_given(config)
    estimate = importlib.import_module("colossus.planner.estimate")
    try:
        hardware, hosts = _hardware_of(config, world_size(config.parallel), hosts)
        stated: tuple[Config, Sequence[str]] = estimate.Estimator(hardware, hosts=hosts).with_stated_split(config)
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"parallel.pipeline.split = 'time': {error}", config.source) from error
    return stated
