"""Where a run goes on from: decided before a process starts, from folders that look like those of runs."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
from helpers.launching import TINY

from colossus.checkpoint.folder import LATEST, name_of
from colossus.checkpoint.manifest import MANIFEST, Manifest
from colossus.config import ConfigError, load_config
from colossus.launch import command, run_folder
from colossus.launch.resume import Origin, RunStart, choose

pytestmark = pytest.mark.usefixtures("no_processes")


def saved(root: Path | str, *steps: int) -> Path:
    """Checkpoints without tensors; the last one."""
    for step in steps:
        path = Path(root) / name_of(step)
        path.mkdir(parents=True)
        (path / MANIFEST).write_bytes(Manifest(step, time.time(), {}, {"text": "data 2"}, {}, {}, {}).to_bytes())
        (path.parent / LATEST).write_text(f"{path.name}\n")
    return path


def run_of(folder: str, *steps: int, rows: int = 5) -> Path:
    """A run folder."""
    path = Path(folder)
    path.mkdir(parents=True)
    (path / "metrics.jsonl").write_text("".join(f'{{"step": {step + 1}}}\n' for step in range(rows)))
    (path / "config.json").write_text('{"train": {"steps": 100}}')
    (path / "run.lock").write_text("")
    if steps:
        saved(path / "checkpoints", *steps)
    return path


def chosen(*overrides: str, **options: Any) -> Origin:
    return choose(load_config(TINY, overrides), **options)


def begin(*overrides: str, **options: Any) -> RunStart:
    """A run that has ended at once."""
    origin = chosen(*overrides, **options)
    origin.check()
    taken = origin.take()
    for lock in taken.locks:
        lock.close()
    return taken


def refused(*overrides: str, **options: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        begin(*overrides, **options)
    return str(caught.value)


def test_the_newest_run_of_this_name_that_has_a_checkpoint_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    assert refused(resume=True) == (
        "--resume: there is no checkpoint in runs/tiny-*; without --resume a run begins at step 1"
    )
    anew = chosen("checkpoint.resume=auto")
    assert (anew.folder, anew.checkpoint) == (None, None)
    run_of("runs/tiny-20260101-000000", 3)
    run_of("runs/tiny-20260102-000000-2", 3, 6)
    run_of("runs/tiny-20260102-000000-10", 9)
    run_of("runs/tiny-20260102-000000", 9)
    run_of("runs/tiny-20260103-000000")
    run_of("runs/tiny-large-20260104-000000", 99)
    run_of("runs/tiny-try", 99)
    for options in ({"resume": True}, {}):
        origin = chosen(*([] if options else ["checkpoint.resume=auto"]), **options)
        origin.check()
        assert origin.folder == Path("runs/tiny-20260102-000000-10")
        assert origin.checkpoint == origin.folder / "checkpoints" / "step-00000009"
        taken = origin.take()
        assert f"the run to be resumed, {origin.folder}, is running (process " in refused(resume=True)
        for lock in taken.locks:
            lock.close()
    assert chosen().folder is None
    assert command.run(str(TINY), [], resume=True, dry_run=True) == 0
    printed = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert printed["run"] == "folder  runs/tiny-20260102-000000-10"
    assert printed["resumes"] == (
        "step 9 of runs/tiny-20260102-000000-10/checkpoints/step-00000009, saved under data 2"
    )


def test_a_run_folder_that_is_named_goes_on_or_is_begun_anew(capsys: pytest.CaptureFixture[str]) -> None:
    assert "there is no checkpoint in there/checkpoints; " in refused(resume=True, run_dir="there")
    run = run_of("mine", 3, 6)
    assert begin(resume=True, run_dir="mine")[:2] == (run, "auto")
    assert (run / "metrics.jsonl").exists()
    assert "holds the metrics of another run already" in refused(run_dir="mine")
    # killed before its first checkpoint: its metrics are kept, out of the way
    lost = run_of("killed")
    for name in ("metrics.lost.jsonl", "metrics.lost-2.jsonl"):
        assert begin("checkpoint.resume=auto", run_dir="killed")[:2] == (lost, None)
        err = capsys.readouterr().err
        assert (err.count("\n"), f"its metrics are in killed/{name}, " in err) == (1, True)
        assert (lost / name).read_text().count("\n") == 5
        assert not (lost / "metrics.jsonl").exists()
        (lost / "metrics.jsonl").write_text('{"step": 1}\n' * 5)


@pytest.mark.parametrize("key", ["dir", "resume"])
def test_no_folder_is_not_the_working_folder(key: str) -> None:
    with pytest.raises(ConfigError, match=f"checkpoint.{key}"):
        chosen(f"checkpoint.{key}=")


def test_a_checkpoint_that_is_named_begins_a_run_of_its_own() -> None:
    run = run_of("first", 3, 6)
    for path in ("first", "first/checkpoints", "first/checkpoints/step-00000006"):
        taken = begin(f"checkpoint.resume={path}")
        assert (taken.folder.parent, taken.resume) == (Path("runs"), os.path.abspath(path))
    assert "holds the metrics of another run already" in refused(f"checkpoint.resume={run}", run_dir="first")
    assert "checkpoint.resume = 'absent': absent: there is no such folder" in refused("checkpoint.resume=absent")
    manifest = run / "checkpoints" / "step-00000006" / MANIFEST
    manifest.write_bytes(manifest.read_bytes()[:-10])
    assert "is truncated or corrupted" in refused("checkpoint.resume=first/checkpoints/step-00000006")
    for other in (run / "checkpoints").glob(f"*/{MANIFEST}"):
        other.write_text("{}")
    assert "nothing can be resumed: first/checkpoints/step-" in refused(resume=True, run_dir="first")


def test_weights_are_there_before_a_process_starts_unless_the_run_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    saved("base/checkpoints", 3, 6)
    assert chosen("checkpoint.weights=base").find_weights() == Path("base/checkpoints/step-00000006")
    assert "checkpoint.weights = 'absent': absent: there is no such folder" in refused("checkpoint.weights=absent")
    with pytest.raises(ConfigError, match="there is no such folder"):
        chosen("checkpoint.weights=absent").take()  # as a node does, or torchrun
    assert not Path("runs").exists()
    assert command.run(str(TINY), ["checkpoint.weights=base"], dry_run=True) == 0
    assert "weights     of step 6, base/checkpoints/step-00000006\n" in capsys.readouterr().out
    run_of("goes-on", 2)
    assert chosen("checkpoint.weights=absent", run_dir="goes-on", resume=True).find_weights() is None
    begin("checkpoint.weights=absent", run_dir="goes-on", resume=True)


def test_checkpoints_of_another_run_are_not_touched() -> None:
    saved("shared", 3, 6)
    ours = ["checkpoint.dir=shared", "checkpoint.every=5"]
    message = refused(*ours)
    assert message.startswith(
        "checkpoint.dir shared: holds 2 checkpoints of another run already (the newest is step-00000006), which this "
        "run would replace and remove; --resume continues it"
    )
    assert not Path("runs").exists()
    elsewhere = saved("elsewhere", 9)
    assert "holds 2 checkpoints of another run" in refused(*ours, f"checkpoint.resume={elsewhere}")
    begin("checkpoint.dir=shared")  # it does not save
    # one that goes on from there owns what is there
    begin(*ours, "checkpoint.resume=shared/step-00000003")
    run_of("used")
    taken = begin(*ours, resume=True)
    assert taken.resume == "auto"
    assert chosen(*ours, resume=True).folder == taken.folder.resolve()  # it is remembered where that run was
    run_of("third", 1)  # the metrics of another run
    for overrides in (ours, [*ours, "checkpoint.resume=auto"]):
        message = refused(*overrides, resume=overrides is ours, run_dir="third")
        assert "holds the metrics of another run already" in message
    assert len((Path("third") / "metrics.jsonl").read_text().splitlines()) == 5
    taken = begin(*ours, resume=True, run_dir="fourth")
    assert chosen(*ours, resume=True).folder == taken.folder.resolve()


def test_a_folder_of_checkpoints_has_one_live_run() -> None:
    ours = ["checkpoint.dir=shared", "checkpoint.every=5"]
    taken = chosen(*ours).take()
    assert "checkpoint.dir shared: another run is using it now (process" in refused(*ours)
    for lock in taken.locks:
        lock.close()
    begin(*ours)


@pytest.mark.parametrize(
    ("folder", "reason"),
    [
        ("file", "checkpoint.dir file: cannot be made: File exists"),
        ("file/below", "checkpoint.dir file/below: cannot be made: Not a directory"),
        pytest.param(
            "/sys/kernel",
            "checkpoint.dir /sys/kernel: cannot be written to: ",
            marks=pytest.mark.skipif(not Path("/sys/kernel").is_dir(), reason="one that root cannot write to"),
        ),
    ],
)
def test_a_folder_that_cannot_hold_checkpoints_is_refused(folder: str, reason: str) -> None:
    Path("file").write_text("")
    assert reason in refused(f"checkpoint.dir={folder}", "checkpoint.every=5", run_dir="run")


def test_ranks_that_outlive_their_launcher_keep_their_folder() -> None:
    run = run_of("mine", 3)
    child = os.fork()
    if not child:
        lock = run_folder.hold(run)
        Path("held").touch()
        while not Path("over").exists():
            time.sleep(0.01)
        os._exit(lock is None)
    while not Path("held").exists():
        time.sleep(0.01)
    assert "mine: the ranks of a launcher that was killed are still there" in refused(resume=True, run_dir="mine")
    Path("over").touch()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    begin(resume=True, run_dir="mine")
