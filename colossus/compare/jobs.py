"""The runs of a comparison: every strategy under every plan with every seed, all checked before the first. No torch."""

from __future__ import annotations

import itertools
import json
import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from colossus.compare.variants import check_plan, make_all, unique_texts
from colossus.config import Config, ConfigError, as_dict, load_config
from colossus.config.overrides import plan_overrides, strategy_overrides
from colossus.launch import run_folder
from colossus.launch.checks import check_required
from colossus.launch.resume import AUTO

#: checkpoints are in the run folders; metrics count bytes; a run that was stopped resumes
_OWN_OVERRIDES = ("comm.accounting=True", "checkpoint.dir=None", f"checkpoint.resume={AUTO}")
_LONGEST_FOLDER = 100
#: the file in the folder of the runs with the end of each and the table
RESULT = "compare.json"


@dataclass(frozen=True)
class Job:
    """One run.

    Attributes:
        label: the name of its row in the table; runs that differ in the seed alone share one.
        seed: the run's seed; None: the config's.
        overrides: all overrides of the file, in the order in which they apply.
        config: the resolved config.
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
        """The file with the output of the run."""
        return self.folder.with_name(f"{self.folder.name}.txt")

    @property
    def is_complete(self) -> bool:
        """True if the run has come to its last step, or ended before that (`EarlyStop`) according to `RESULT`."""
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
    """Return the runs in order: for each strategy all plans, for each of these all seeds.

    Args:
        root: the folder of the run folders; by default it is named for the config and the time.

    Raises:
        ConfigError: with all problems of any of them; a problem of all is listed once.
    """
    if not strategies and not plans:
        raise ConfigError(
            "nothing to compare: pass --strategies, for example --strategies all_reduce sgp 'sgp overlap=1', or "
            "--plans, for example --plans 'data=4' 'data=2 tensor=2'"
        )
    for text in overrides:
        if strategies and (text.partition("=")[0] + ".").startswith("parallel.strategy."):
            raise ConfigError(
                f"{text}: --strategies sets the strategies: write the option into the text of a strategy, "
                f"'{strategies[-1]} option=..'"
            )
    pairs = itertools.product(unique_texts(strategies) or (None,), unique_texts(plans) or (None,))
    variants = {", ".join(filter(None, pair)): pair for pair in pairs}

    def jobs_of(label: str) -> list[Job]:
        nonlocal root
        strategy, plan = variants[label]
        mine = list(overrides)
        mine += plan_overrides(plan) if plan is not None else []
        mine += strategy_overrides(strategy) if strategy is not None else []
        config = load_config(file, mine, nproc)
        check_required(config)
        if config.checkpoint.resume not in (None, AUTO):
            raise ConfigError(
                f"checkpoint.resume = {config.checkpoint.resume!r}: the runs of a comparison begin at the first "
                f"step; checkpoint.weights=.. loads weights for them",
                config.source,
            )
        root = root or run_folder.default_folder(f"compare-{config.name}")
        first, jobs = config.train.seed, []
        for seed in range(first, first + num_seeds) if num_seeds > 1 else [None]:
            own = (*mine, *([f"train.seed={seed}"] if seed is not None else []), *_OWN_OVERRIDES)
            folder = root / _folder_name(label, seed)
            jobs.append(Job(label, seed, file, own, nproc, load_config(file, own, nproc), folder))
        return jobs

    return [job for jobs in make_all(variants, jobs_of) for job in jobs]


def check_jobs(jobs: Sequence[Job]) -> None:
    """Check all jobs as a launch checks them before its processes start: run folders, models, data.

    Raises:
        ConfigError: see `make_jobs`.
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

    make_all(by_label, check)


def _check_folder(job: Job) -> None:
    """Raise ConfigError if the folder has a run with another config."""
    run_folder.check(job.folder, is_own=True)
    try:
        stored = json.loads((job.folder / run_folder.CONFIG).read_text())
    except FileNotFoundError:
        return
    except (OSError, ValueError) as error:
        raise ConfigError(f"--out: {job.folder / run_folder.CONFIG} cannot be read: {error}") from None
    wanted = json.loads(json.dumps(as_dict(job.config), default=str))
    if stored != wanted:
        different = [key for key in wanted if not isinstance(stored, dict) or stored.get(key) != wanted[key]]
        raise ConfigError(
            f"--out: the run in {job.folder} has another config ({', '.join(different)}): pass another folder"
        )


def _done(result: Path) -> set[str]:
    """Return the names of the runs that are done according to the file of the last comparison."""
    try:
        return {run["name"] for run in json.loads(result.read_bytes())["runs"] if run["state"] == "done"}
    except (OSError, ValueError, LookupError, TypeError):
        return set()


def _folder_name(label: str, seed: int | None) -> str:
    """Return a readable file name for a label; different labels have different names."""
    plain = label.replace(", ", "-").replace(" ", "-")
    name = re.sub(r"[^\w.=,+()-]", "_", plain)[:_LONGEST_FOLDER]
    if name != plain:
        name = f"{name}-{zlib.crc32(label.encode()):08x}"
    return name if seed is None else f"{name}-seed{seed}"
