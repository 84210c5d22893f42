"""Files that are not as they were written: found, named, and passed over where an older checkpoint is whole."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from helpers.checkpointing import latest_step, one_process, save, step_in
from helpers.damage import DAMAGES, MANIFEST, Damage
from helpers.ranks import run_ranks
from hypothesis import given, settings
from hypothesis import strategies as st

from colossus.checkpoint import folder
from colossus.checkpoint.checkpoint_store import DiskStore
from colossus.checkpoint.errors import DamagedCheckpoint
from colossus.context.parallel_context import ParallelContext


def _save(context: ParallelContext, root: Path) -> None:
    writer = DiskStore(root, context)
    for step in (1, 2):
        save(writer, step, rank=context.rank, world=2)
    writer.finish()


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the checkpoints of two ranks after steps 1 and 2. Not to be changed."""
    root = tmp_path_factory.mktemp("written") / "checkpoints"
    run_ranks(2, _save, root)
    return root


@pytest.fixture
def root(written: Path, in_memory: Path) -> Path:
    return Path(shutil.copytree(written, in_memory / "checkpoints"))


@pytest.mark.parametrize("damage", DAMAGES, ids=str)
def test_damage_is_named_and_passed_over(root: Path, damage: Damage, caplog: pytest.LogCaptureFixture) -> None:
    newest = root / "step-00000002"
    damage.do(newest)
    with pytest.raises(DamagedCheckpoint, match=damage.said) as raised:
        step_in(newest, 2)
    assert str(newest) in str(raised.value)
    if not damage.needs_reading:
        assert latest_step(root, 2) == 1
        assert str(raised.value) in caplog.text
        assert f"{newest} is damaged: taking {root / 'step-00000001'} instead" in caplog.text


def test_latest_names_what_is_not_there(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    shutil.rmtree(root / "step-00000002")
    assert latest_step(root, 2) == 1
    assert "latest names 'step-00000002', which does not exist: taking the newest" in caplog.text
    for text in (b"", b"\0\0\0", b"\xff\xfe", b"../../etc", b"step-00000001/../step-00000001"):
        (root / "latest").write_bytes(text)
        assert latest_step(root, 2) == 1
    (root / "latest").unlink()
    (root / "latest").mkdir()
    assert latest_step(root, 2) == 1


@pytest.mark.parametrize("has_latest", [True, False])
def test_the_newest_was_saved_last_whatever_times_files_have(root: Path, has_latest: bool) -> None:
    """A copy of a folder may have lost the times of its files, and ``latest``."""
    for path, seconds in ((root / "step-00000001", 2e9), (root / "step-00000002", 1e9)):
        os.utime(path / MANIFEST, (seconds, seconds))
    if not has_latest:
        (root / "latest").unlink()
    assert latest_step(root, 2) == 2
    folder.prune(root, 1, 0)
    assert sorted({*os.listdir(root)} - {"latest"}) == ["step-00000002"]


def test_a_run_that_goes_on_from_an_older_one_says_what_it_will_remove(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder.resume_from(root / "step-00000002", 3)
    assert not caplog.records
    folder.resume_from(root / "step-00000001", 3)
    assert "from step-00000001, but the folder has newer checkpoints: step-00000002." in caplog.text
    assert "checkpoint.keep_last = 3" in caplog.text
    assert latest_step(root, 2) == 1


def test_a_damaged_checkpoint_of_the_same_step_is_replaced(root: Path) -> None:
    """The one that had been put aside when a former run was killed is kept until then."""
    shutil.copytree(root / "step-00000001", root / "step-00000002.replaced")
    os.truncate(root / "step-00000002" / MANIFEST, 100)
    assert latest_step(root, 2) == 1
    save(DiskStore(root, one_process()), 2)
    assert latest_step(root) == 2
    assert not (root / "step-00000002.replaced").exists()


# -- any byte ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def spoilt(written: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that is spoilt and mended again and again."""
    return Path(shutil.copytree(written / "step-00000002", tmp_path_factory.mktemp("spoilt") / "step-00000002"))


def _is_found(checkpoint: Path) -> bool:
    try:
        step_in(checkpoint, 2)
    except DamagedCheckpoint:
        return True
    return False


@settings(max_examples=60)
@given(number=st.integers(0, 2), place=st.floats(0, 1, exclude_max=True), mask=st.integers(1, 255))
def test_any_byte_that_changes_is_found(spoilt: Path, number: int, place: float, mask: int) -> None:
    path = spoilt / sorted(os.listdir(spoilt))[number]
    data = path.read_bytes()
    at = int(place * len(data))
    try:
        path.write_bytes(data[:at] + bytes([data[at] ^ mask]) + data[at + 1 :])
        assert _is_found(spoilt), f"byte {at} of {path.name}"
        path.write_bytes(data[:at])
        assert _is_found(spoilt), f"{path.name} cut to {at} bytes"
        path.write_bytes(data[:at] + data[at + 1 :])
        assert _is_found(spoilt), f"{path.name} without byte {at}"
    finally:
        path.write_bytes(data)
    assert not _is_found(spoilt)
