"""Classes of a config file in processes that begin with an interpreter of their own: data loader workers."""

from __future__ import annotations

import pickle
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from helpers.datasets import Numbers, loaders
from helpers.launching import environment, finish, start

from colossus.config.loading import read_file

CONFIG = """
import multiprocessing
import torch
from torch import nn
if {raises} and multiprocessing.current_process().name != "MainProcess":
    raise RuntimeError("it cannot begin")
class Data:
    def __len__(self): return 8
    def __getitem__(self, index): return {{"inputs": torch.full((4,), float(index)), "labels": torch.ones(3)}}
def collate(samples): return torch.utils.data.default_collate(samples)
class Net(nn.Linear):
    def __init__(self): super().__init__(4, 3)
    def loss(self, outputs, batch): return (outputs * batch["labels"]).sum(), len(outputs)
model = dict(type=Net)
data = dict(type=Data, num_workers=1, collate_fn={collate})
train = dict(steps=2, global_batch_size=4)
optimizer = dict(type="SGD", lr=0.1)
device = "cpu"
"""


def launch(folder: Path, method: str, *, raises: bool = False, collate: str = "collate", **how: Any) -> tuple[int, str]:
    """The exit code of a run with these workers, and what it has printed."""
    file = folder / "of-classes.py"
    file.write_text(CONFIG.format(raises=raises, collate=collate))
    words = [sys.executable, "-m", "colossus", "launch", str(file), f"data.multiprocessing_context={method}"]
    code, out, err = finish(start(words, folder, **how))
    return code, out + err


@pytest.fixture
def path(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr(sys, "path", list(sys.path))
    return sys.path


def test_a_class_of_a_config_is_found_in_another_process(tmp_path: Path, path: list[str]) -> None:
    """As `multiprocessing` does it: with this process's `sys.path`."""
    file = tmp_path / "of-numbers 2.py"
    file.write_text("class _Numbers:\n    start = 3\n_numbers = _Numbers()\n_numbers.count = 4\n")
    read_file(file)
    numbers = pickle.dumps(sys.modules["colossus_config_of_numbers_2"]._numbers)
    body = "import colossus, pickle, sys; sys.path[:] = {}; x = pickle.loads({}); print(x.start, x.count)"
    done = subprocess.run(
        [sys.executable, "-c", body.format(path, numbers)], env=environment(), capture_output=True, text=True
    )
    assert done.stdout == "3 4\n", done.stderr
    (tmp_path / "of-numbers_2.py").write_text("")
    del sys.modules["colossus_config_of_numbers_2"]
    with pytest.raises(ImportError, match=r"of-numbers 2.py and of-numbers_2.py in .* are one module"):
        pickle.loads(numbers)


def test_the_folder_of_the_config_read_last_comes_first(tmp_path: Path, path: list[str]) -> None:
    for name in ("one", "two", "one"):
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / "plain.py").write_text(f"class Named:\n    name = {name!r}\n")
        read_file(tmp_path / name / "plain.py")
        pickled = pickle.dumps(sys.modules["colossus_config_plain"].Named)
        del sys.modules["colossus_config_plain"]
        assert pickle.loads(pickled).name == name


class Holds(Numbers):
    def __init__(self, held: Any) -> None:
        super().__init__()
        self.held = held


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_what_cannot_be_sent_to_workers_is_refused_by_its_name(method: str) -> None:
    options = {"num_workers": 2, "multiprocessing_context": method}
    for dataset, more, words in (
        (Holds(lambda x: x), {}, r"Holds\.held is the function <lambda> of test_config_workers.py, line \d+"),
        (Holds({"to": [int, partial(lambda x: x)]}), {}, r"Holds\.held\['to'\]\[1\] is a partial"),
        (Holds(Holds(i for i in ())), {}, r"Holds\.held\.held is a generator"),
        (Numbers(), {"collate_fn": lambda samples: samples}, r"data\.collate_fn is the function <lambda>"),
    ):
        with pytest.raises(
            ValueError, match=rf"num_workers = 2: {words}.* which cannot be sent to workers that '{method}"
        ):
            loaders({"type": dataset, **options, **more})
        loaders({"type": dataset, **options, **more, "multiprocessing_context": "fork"})


@pytest.mark.long
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_dataset_of_the_config_is_read_by_workers(method: str, tmp_path: Path) -> None:
    code, said = launch(tmp_path, method, new_python=True)
    assert code == 0, said
    assert "done: 2 steps" in said


def test_a_lambda_is_refused_before_the_launch(tmp_path: Path) -> None:
    code, said = launch(tmp_path, "spawn", collate="lambda samples: samples")
    assert code == 2
    assert said.startswith(
        "colossus: of-classes.py: data: data.num_workers = 1: data.collate_fn is the function <lambda>"
    )


@pytest.mark.long
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_worker_that_cannot_begin_ends_the_run(method: str, tmp_path: Path) -> None:
    """Within seconds: data.worker_timeout is 300."""
    code, said = launch(tmp_path, method, raises=True, new_python=True)
    assert code != 0
    assert "RuntimeError: it cannot begin" in said
    assert "exited unexpectedly, before it returned a batch: its output says why" in said
