"""Restarts: seconds from a rank's death to the end of the next step, and the price of checkpoints in memory.

    python -m benchmarks.restarts                        # both tables
    python -m benchmarks.restarts --only cost --hidden 512

*Restarts*: two ranks of a GPT are launched, and one of them kills itself before step 16. From the death on, launcher
and ranks write down when each part is over, a part of the ranks when the slowest is through. `every 1` and `every 10`
save in memory (`checkpoint.memory_every`), `disk` saves on the disk every 10 steps.

*Cost*: one engine on two ranks trains in blocks of 10 steps that take turns, with one save in memory in a block, and
without. The save is begun behind the first step, and waited for at the end of the block, inside of the clock.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import common, restart_moments, train_step
from benchmarks.common import Spread
from benchmarks.ranks import RankGroup
from benchmarks.workload import Workload
from colossus.config import load_config
from colossus.launch import attempt_log
from colossus.launch.memory_folder import open_memory_folder

ROOT = Path(__file__).resolve().parent.parent
RUN = Path(__file__).with_name("restarted_run.py")
WORLD, EVERY, DEATH = 2, 10, 16
#: checkpoints are those of the disk alone, or of memory alone
SAVES = {
    "every 1": ("checkpoint.memory_every=1", "checkpoint.every=1000"),
    f"every {EVERY}": (f"checkpoint.memory_every={EVERY}", "checkpoint.every=1000"),
    "disk": (f"checkpoint.every={EVERY}",),
}
#: part -> the moment when it is over, in order; `python`: until the config file is read; `imports`: of torch, too
PARTS = {
    "noticed": "noticed",
    "all gone": "gone",
    "started": "started",
    "python": "python",
    "imports": "imported",
    "built": "built",
    "resumed": "resumed",
    "first step": "step",
}


# -- restarts -------------------------------------------------------------------------------------------------


def restart(hidden: int, saves: str, death: int) -> dict[str, float]:
    """Launch a run that is restarted once.

    Returns:
        Seconds of each part, their sum as ``total``, and ``redone``, the steps that were done twice.

    Raises:
        RuntimeError: when it does not end well, or was not restarted once.
    """
    with tempfile.TemporaryDirectory(prefix="colossus-benchmark-") as folder:
        moments, out = Path(folder) / "moments", Path(folder) / "run"
        keys = [*SAVES[saves], f"model.hidden_size={hidden}", f"train.steps={death + 2}"]
        words = [sys.executable, "-m", "benchmarks.restart_moments", "launch", str(RUN), "--run-dir", str(out), *keys]
        environ = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
        paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        variables = {
            restart_moments.FILE: str(moments),
            "DEATH": str(death),
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": paths,
        }
        done = subprocess.run(words, cwd=folder, env=environ | variables, capture_output=True, text=True)
        attempts = attempt_log.read(out)
        if done.returncode or len(attempts) != 2:
            raise RuntimeError(
                f"{saves}: exit code {done.returncode}, {len(attempts)} attempts\n{done.stdout}{done.stderr}"
            )
        return parts_of(restart_moments.read(moments)) | {"redone": attempts[1]["steps_redone"]}


def parts_of(moments: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return the seconds of each of `PARTS` behind the death, and of all."""
    (died,) = (moment["time"] for moment in moments if moment["name"] == "death")
    parts, before = {}, died
    for part, name in PARTS.items():
        times = [moment["time"] for moment in moments if moment["name"] == name and moment["time"] >= died]
        is_of_launcher = part in ("noticed", "all gone", "started")
        now = times[0 if is_of_launcher else WORLD - 1]  # by the slowest rank
        parts[part], before = now - before, now
    return parts | {"total": before - died}


def measure_restarts(hidden: int, blocks: int, kinds: Sequence[str], death: int) -> dict[str, list[dict[str, float]]]:
    results: dict[str, list[dict[str, float]]] = {saves: [] for saves in kinds}

    def once(saves: str) -> float:
        results[saves].append(restart(hidden, saves, death))
        return results[saves][-1]["total"]

    common.alternate({saves: partial(once, saves) for saves in kinds}, blocks, label="restarts:")
    columns = ("redone", *PARTS, "total")
    rows = [
        (saves, *(f"{Spread.of([parts[column] for parts in of_kind]).median:.2f}" for column in columns))
        for saves, of_kind in results.items()
    ]
    title = f"seconds from a death to the end of the next step, hidden {hidden}, {WORLD} ranks; median of {blocks} runs"
    common.print_table(title, ("saves", "steps redone", *columns[1:]), rows)
    return results


# -- what a step pays -----------------------------------------------------------------------------------------


class Saving:
    """A rank whose engine saves in memory in some blocks, and not in others."""

    def __init__(self, workload: Workload, rank: int) -> None:
        from benchmarks.peers.ours import ColossusCase

        self.case = ColossusCase(workload, rank, WORLD, parallel={"data": WORLD}, checkpoint={"memory_every": EVERY})
        for index in range(EVERY - 1):  # the next step is one behind which a save is due
            self.case.run(index)

    def block(self, is_saving: bool) -> float:
        """Return the seconds of a step."""
        checkpoints = self.case.engine.checkpoints
        begin = time.perf_counter()
        for index in range(EVERY):
            self.case.step(index)
            if is_saving:
                checkpoints.after_step()
        checkpoints.finish_all()
        return (time.perf_counter() - begin) / EVERY

    def saved(self) -> list[int]:
        """Return the steps whose checkpoints are whole in memory."""
        from colossus.checkpoint import folder

        return sorted(folder.named(Path(os.environ[folder.MEMORY])).values())

    def close(self) -> None:
        self.case.engine.close()


def measure_cost(workload: Workload, blocks: int) -> dict[str, list[float]]:
    """Return the seconds of a step with and without, and without again.

    Raises:
        RuntimeError: when a block has saved nothing, or one without has.
    """
    config = load_config(str(RUN), [f"checkpoint.memory_every={EVERY}"])

    def run(group: RankGroup, is_saving: bool) -> float:
        before = group.call("saved")[0]
        seconds = max(group.call("block", is_saving))
        if (group.call("saved")[0] != before) is not is_saving:
            raise RuntimeError(
                f"saving is {is_saving}: in memory there were {before}, and then {group.call('saved')[0]}"
            )
        return seconds

    with open_memory_folder(config), RankGroup("memory", WORLD, partial(Saving, workload)) as group:
        run(group, True)  # memory for the copies
        without, saving = partial(run, group, False), partial(run, group, True)
        runners = {"without": without, f"memory_every={EVERY}": saving, "without (again)": without}
        series = common.alternate(runners, blocks, label="cost:")
        group.call("close")
    rows = [
        (name, f"{Spread.of(times).median * 1e3:.2f}", common.ratio(series, name, "without"))
        for name, times in series.items()
    ]
    common.print_table(f"{workload}, data {WORLD}; {blocks} blocks", ("case", "ms/step", "time / without"), rows)
    return series


def main(argv: Sequence[str] | None = None) -> int:
    parser = common.make_parser(__doc__, blocks=5)
    parser.add_argument("--only", choices=("restarts", "cost"), help="one of the two tables")
    parser.add_argument("--saves", nargs="+", choices=list(SAVES), default=list(SAVES), help="of restarted runs")
    parser.add_argument("--run-hidden", type=int, default=64, help="hidden size of these (default %(default)s)")
    parser.add_argument("--hidden", type=int, default=512, help="of the GPT that is timed (default %(default)s)")
    arguments = parser.parse_args(argv)
    blocks, hidden, death, kinds = arguments.blocks, arguments.run_hidden, DEATH, arguments.saves
    workload = train_step.sizes(arguments.hidden)
    if arguments.smoke:
        blocks, hidden, kinds, workload = 1, 16, kinds[:1], train_step.SMOKE
    result: dict[str, Any] = {}
    if arguments.only != "cost":
        result["restarts"] = measure_restarts(hidden, blocks, kinds, death)
    if arguments.only != "restarts":
        result["seconds_per_step"] = measure_cost(workload, 2 * blocks)
    common.write_json(arguments.json, result)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
