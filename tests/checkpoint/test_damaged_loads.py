"""An engine and a checkpoint that is not what it should be: all ranks say so, and nothing of the engine has changed."""

from __future__ import annotations

import errno
import pickle
import re
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.damage import DAMAGES, PICKLE, Damage, rewritten, truncate
from helpers.disk import watched
from helpers.ranks import run_ranks
from helpers.small_run import Counter, Lines, Net, everything, make_engine
from torch import distributed as dist

from colossus.checkpoint import checkpoint_store
from colossus.checkpoint.errors import CheckpointError
from colossus.checkpoint.reader import CheckpointReader
from colossus.checkpoint.weight_sources import open_weights
from colossus.engine.engine import Engine

#: of the matrix that `test_corruption` has, and of a file for all to see
_OF_THE_MATRIX = ("a hole", "overlap", "both", "a chunk", "an offset")


def _damages() -> list[Damage]:
    """Those of files; the shapes of tensors are tried on a small one."""
    return [damage for damage in DAMAGES if not any(word in damage.name for word in _OF_THE_MATRIX)]


def _value(path: str, value: Any) -> Callable[[Path], None]:
    return rewritten(lambda body: body["values"].__setitem__(path, value))


#: values that a person has written; each would be decoded
VALUES = [
    Damage("objects", _value("train", {"$array": ["model/first.bias", "|O", [3]]}), r"train cannot .*dtype '\|O'"),
    Damage("no such tensor", _value("train", {"$tensor": "../../etc/passwd"}), r"train cannot .*no tensor '../../etc"),
    Damage("no shape", _value("train", {"$array": ["model/first.bias", "<f8", [7, 7]]}), r"train cannot be underst"),
]


def _loads(rank: int, root: Path) -> list[tuple[str, str, bool]]:
    """(damage, what was said, whether nothing changed) on this rank, for one damage after the other."""
    engine = make_engine(root, every=1, background=False)
    engine.checkpoints.hooks = [Counter()]
    batches = iter(engine.loader)
    for _ in range(2):
        engine.train_step(next(batches))
        engine.checkpoints.after_step()
    engine.train_step(next(batches))
    before = everything(engine)
    outcomes = []

    def attempt(name: str, path: Path, of: Engine = engine) -> None:
        unchanged = everything(of)
        try:
            of.checkpoints.load(path)
            outcomes.append((name, "was loaded", False))
        except CheckpointError as error:
            outcomes.append((name, str(error), everything(of) == unchanged and of.checkpoints.resumed_from is None))

    for damage in [*_damages(), *VALUES]:
        path = root.parent / "damaged"
        if rank == 0:
            shutil.copytree(root / "step-00000002", path)
            damage.do(path)
        dist.barrier()
        attempt(damage.name, path)
        dist.barrier()
        if rank == 0:
            shutil.rmtree(path)
    assert everything(engine) == before

    # trouble of one rank's own
    def unreadable(name: str, *args: Any, **more: Any) -> None:
        if rank == 1 and str(args[0]).endswith("rank-00001.safetensors"):  # whose checksum rank 0 looks at
            raise OSError(errno.EIO, "Input/output error", str(args[0]))

    with watched(unreadable, ("open",)):
        attempt("unreadable", root / "step-00000002")
    if rank == 1:  # a node that does not have the folder
        checkpoint_store.open_weights = lambda folder, *_: CheckpointReader(folder.with_name("step-00000007"))  # type: ignore
    attempt("not seen", root / "step-00000002")
    checkpoint_store.open_weights = open_weights  # type: ignore[attr-defined]
    engine.checkpoints.finish()
    attempt("another model", root / "step-00000002", make_engine(None, model=dict(type=Net, width=4, name="third")))
    return outcomes


def test_a_load_that_fails_changes_nothing(in_memory: Path) -> None:
    root = in_memory / "checkpoints"
    here, there = run_ranks(2, _loads, root, with_context=False)
    patterns = {damage.name: damage.said for damage in [*_damages(), *VALUES]}
    patterns["another model"] = r"step-00000002 is of another model: .*second.weight.*of another shape.*first.weight"
    patterns["unreadable"] = r"rank-00001.safetensors.*Input/output error"
    patterns["not seen"] = r"there is no manifest.json in it.*\(rank 1 on "
    assert {name for name, _, _ in here} == patterns.keys()
    for (name, mine, is_same_here), (_, theirs, is_same_there) in zip(here, there, strict=True):
        assert re.search(patterns[name], mine), f"{name}: {mine}"
        assert is_same_here, name
        assert is_same_there, name
        assert mine == theirs, name


def _resumes(rank: int, root: Path, pristine: Path) -> list[Any]:
    lines, answers = Lines(), []
    engine = make_engine(root, every=1, background=False, resume="auto")
    batches = iter(engine.loader)
    states = {}
    for step in (1, 2, 3):
        engine.train_step(next(batches))
        engine.checkpoints.after_step()
        states[step] = everything(engine)[1:3]
    if rank == 0:
        shutil.copytree(root, pristine)
    for damage in ("data flipped", "manifest cut"):
        dist.barrier()
        if rank == 0:
            shutil.rmtree(root)
            shutil.copytree(pristine, root)
            next(entry for entry in DAMAGES if entry.name == damage).do(root / "step-00000003")
            if damage == "data flipped":  # and the one before in another way
                truncate(root / "step-00000002" / "rank-00000.safetensors", 1)
        dist.barrier()
        lines.lines.clear()
        engine.checkpoints.resumed_from = None
        resumed = engine.checkpoints.resume()
        assert resumed is not None
        step = engine.completed_steps
        answers.append((damage, resumed.name, step, everything(engine)[1:3] == states[step], list(lines.lines)))
    return answers


def test_resume_takes_the_newest_that_is_whole(in_memory: Path) -> None:
    """All ranks the same, also where only a checksum tells; rank 0 says what was wrong."""
    root = in_memory / "checkpoints"
    here, there = run_ranks(2, _resumes, root, in_memory / "pristine", with_context=False)
    assert [answer[:4] for answer in here] == [answer[:4] for answer in there]
    assert [answer[:4] for answer in here] == [
        ("data flipped", "step-00000001", 1, True),
        ("manifest cut", "step-00000002", 2, True),
    ]
    patterns = {damage.name: damage.said for damage in DAMAGES}
    for name, resumed, _, _, lines in here:
        assert re.search(patterns[name], lines[0]), lines
        assert lines[0].startswith("WARNING")
        assert f"WARNING {root / 'step-00000003'} is damaged: taking {root / resumed} instead" in lines, lines
    assert all(not lines for *_, lines in there)


def test_no_pickle_is_opened(in_memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted in every place that another reader would unpickle."""
    root = in_memory / "checkpoints"
    engine = make_engine(root, every=1, background=False, data=1)
    engine.checkpoints.hooks = [Counter()]
    engine.train_step(next(iter(engine.loader)))
    engine.checkpoints.after_step()
    checkpoint = root / "step-00000001"
    for name in (".metadata", "model.pt", "optimizer.bin", "state.pkl", "__0_0.distcp", "latest.pickle"):
        (checkpoint / name).write_bytes(PICKLE)
        (root / name).write_bytes(PICKLE)
    monkeypatch.chdir(in_memory)
    with monkeypatch.context() as patched:

        def refuse(*args: Any, **more: Any) -> None:
            raise AssertionError("a pickle would have been opened")

        for module, name in ((pickle, "load"), (pickle, "loads"), (pickle, "Unpickler"), (pickle, "_Unpickler"),
                             (torch, "load"), (np, "load"), (torch.serialization, "_load")):  # fmt: skip
            patched.setattr(module, name, refuse)
        for path in (root, checkpoint):
            engine.checkpoints.load(path)
        # the file of a rank is a pickle, and the manifest says that it should be
        data = PICKLE.ljust((checkpoint / "rank-00000.safetensors").stat().st_size, b"\0")
        (checkpoint / "rank-00000.safetensors").write_bytes(data)
        rewritten(lambda body: body["files"][0].__setitem__(2, f"{zlib.crc32(data):08x}"))(checkpoint)
        with pytest.raises(
            CheckpointError, match=r"mt19937 state; parts of it are loaded already: load a checkpoint bef"
        ):
            engine.checkpoints.load(checkpoint)  # numbers, some of which no random generator can have
    assert not (in_memory / "unpickled").exists()
    assert pickle.loads(PICKLE) is None, "of the test: this is what the pickle does"
    assert (in_memory / "unpickled").exists()


def test_other_formats_are_refused_in_words(in_memory: Path) -> None:
    """A file of torch.save, a folder of torch.distributed.checkpoint, and what is not there."""
    file, folder = in_memory / "file", in_memory / "folder"
    torch.save({"w": torch.zeros(2)}, file)
    folder.mkdir()
    (folder / ".metadata").write_bytes(PICKLE)
    engine, refused = make_engine(None, data=1), r"is neither a checkpoint of colossus .*load_full_st"
    for path, message in ((file, refused), (folder, refused), (in_memory / "absent", "there is no such folder")):
        with pytest.raises(CheckpointError, match=f"^{path}.*{message}"):
            engine.checkpoints.load(path)
