"""What is to be run: every strategy under every plan with every seed, all checked before the first begins. No torch."""

from __future__ import annotations

import itertools
import json
import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from colossus.compare.variants import check_plan, each_of, of_each
from colossus.config import Config, ConfigError, as_dict, load_config
from colossus.config.overrides import plan_overrides, strategy_overrides
from colossus.launch import run_folder
from colossus.launch.checks import check_given
from colossus.launch.resume import AUTO

#: the run folders are the places of checkpoints; rows tell what was sent; a run that was stopped goes on
_OWN_OVERRIDES = ("comm.accounting=True", "checkpoint.dir=None", f"checkpoint.resume={AUTO}")
_LONGEST_FOLDER = 100
#: in the folder of the runs: how each ended, and the table
RESULT = "compare.json"


@dataclass(frozen=True)
class Job:
    """One run.

    Attributes:
        label: what its row of the table is called: runs that differ in the seed alone share one.
        seed: None where the config's is taken.
        overrides: all of them, in the order in which they are laid over the file.
        config: as it is resolved.
    """

    label: str
    seed: int | None
    file: str
    overrides: tuple[str, ...]
    nproc: int | None
    config: Config
    folder: Path

    @property
    def name(self) -> str:
        return self.label if self.seed is None else f"{self.label}, seed {self.seed}"

    @property
    def output(self) -> Path:
        """What the run prints."""
        return self.folder.with_name(f"{self.folder.name}.txt")

    @property
    def is_complete(self) -> bool:
        """Whether it has been run to its last step, or was done before that (`EarlyStop`) as `RESULT` says."""
        row = run_folder.last_metrics(self.folder)
        if row is None:
            return False
        return int(row["step"]) >= self.config.train.steps or self.name in _done(self.folder.parent / RESULT)


def make_jobs(
    file: str,
    overrides: Sequence[str],
    *,
    strategies: Sequence[str] = (),
    plans: Sequence[str] = (),
    num_seeds: int = 1,
    nproc: int | None = None,
    root: Path | None = None,
) -> list[Job]:
    """The runs in order: of each strategy all plans, of each of these all seeds.

    Args:
        root: the folder of the run folders; by default one that the config's name and the time name.

    Raises:
        ConfigError: with all that is wrong with any of them; what is wrong with all is said once.
    """
    if not strategies and not plans:
        raise ConfigError(
            "nothing to compare: give --strategies, for example --strategies all_reduce sgp 'sgp overlap=1', or "
            "--plans, for example --plans 'data=4' 'data=2 tensor=2'"
        )
    for text in overrides:
        if strategies and (text.partition("=")[0] + ".").startswith("parallel.strategy."):
            raise ConfigError(
                f"{text}: --strategies says what the strategies are: write it into the text of each that it is for, "
                f"'{strategies[-1]} option=..'"
            )
    pairs = itertools.product(each_of(strategies) or (None,), each_of(plans) or (None,))
    given = {", ".join(filter(None, pair)): pair for pair in pairs}

    def of(label: str) -> list[Job]:
        nonlocal root
        strategy, plan = given[label]
        mine = list(overrides)
        mine += plan_overrides(plan) if plan is not None else []
        mine += strategy_overrides(strategy) if strategy is not None else []
        config = load_config(file, mine, nproc)
        check_given(config)
        if config.checkpoint.resume not in (None, AUTO):
            raise ConfigError(
                f"checkpoint.resume = {config.checkpoint.resume!r}: the runs of a comparison begin at the first "
                f"step; checkpoint.weights=.. gives them weights",
                config.source,
            )
        root = root or run_folder.default_folder(f"compare-{config.name}")
        first, jobs = config.train.seed, []
        for seed in range(first, first + num_seeds) if num_seeds > 1 else [None]:
            own = (*mine, *([f"train.seed={seed}"] if seed is not None else []), *_OWN_OVERRIDES)
            folder = root / _folder_name(label, seed)
            jobs.append(Job(label, seed, file, own, nproc, load_config(file, own, nproc), folder))
        return jobs

    return [job for jobs in of_each(given, of) for job in jobs]


def check_jobs(jobs: Sequence[Job]) -> None:
    """What a launch checks before its processes start, of all jobs: run folders, models, data.

    Raises:
        ConfigError: as `make_jobs`.
    """
    checked: set[str] = set()
    by_label: dict[str, list[Job]] = {}
    for job in jobs:
        by_label.setdefault(job.label, []).append(job)

    def check(label: str) -> None:
        for job in by_label[label]:
            plan = repr((job.config.parallel.model_copy(update={"strategy": None}), job.config.schedule))
            _check_folder(job)
            if plan not in checked:
                checked.add(plan)
                check_plan(job.config)

    of_each(by_label, check)


def _check_folder(job: Job) -> None:
    """Refuse the folder of a run with another config."""
    run_folder.check(job.folder, is_own=True)
    try:
        held = json.loads((job.folder / run_folder.CONFIG).read_text())
    except FileNotFoundError:
        return
    except (OSError, ValueError) as error:
        raise ConfigError(f"--out: {job.folder / run_folder.CONFIG} cannot be read: {error}") from None
    wanted = json.loads(json.dumps(as_dict(job.config), default=str))
    if held != wanted:
        different = [key for key in wanted if not isinstance(held, dict) or held.get(key) != wanted[key]]
        raise ConfigError(
            f"--out: the run in {job.folder} has another config ({', '.join(different)}): give another folder"
        )


def _done(result: Path) -> set[str]:
    """Names of the runs that are done by what the last comparison wrote."""
    try:
        return {run["name"] for run in json.loads(result.read_bytes())["runs"] if run["state"] == "done"}
    except (OSError, ValueError, LookupError, TypeError):
        return set()


def _folder_name(label: str, seed: int | None) -> str:
    """A file name for a label: readable, and another one for another label."""
    plain = label.replace(", ", "-").replace(" ", "-")
    name = re.sub(r"[^\w.=,+()-]", "_", plain)[:_LONGEST_FOLDER]
    if name != plain:
        name = f"{name}-{zlib.crc32(label.encode()):08x}"
    return name if seed is None else f"{name}-seed{seed}"
