"""A resolved config as the ranks of a launch read it, and what a config file may not say differently there."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from colossus.config import Config, ConfigError, load_config, resolve, state_config
from colossus.config.resolved import read_resolved, write_resolved

ROOT = Path(__file__).parents[2]
FILE = """
import os
from pathlib import Path
from torch import nn

class Net(nn.Module):
    def __init__(self, width, where, spec):
        super().__init__()

class Samples:
    def __len__(self):
        return 8
    def __getitem__(self, index):
        return index

def log(row):
    return {}

model = dict(type=Net, width=6, where=Path("somewhere"), spec={"type": Net})
data = Samples()
optimizer = dict(type="AdamW", betas=(0.9, 0.95), groups=[dict(match="*.bias", weight_decay=0.0)])
hooks = [dict(type="Callback", add_to_row=log), dict(type="MLflow", tracking_uri="http://name:secret@host")]
parallel = dict(data=2)
train = dict(seed=int(os.environ.get("SEED", "3")), global_batch_size=8)
"""


def same(config: Config, stated: Config, folder: Path) -> Config:
    write_resolved(folder / "resolved.json", config, stated)
    return read_resolved(folder / "resolved.json", stated)


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.py")), ids=lambda path: path.stem)
def test_what_is_read_is_what_was_written(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    stated = state_config(path)
    try:
        config = resolve(stated)
    except ConfigError as error:  # weights that are not here
        pytest.skip(str(error))
    read = same(config, stated, tmp_path)
    assert read == config
    assert read.model_fields_set == config.model_fields_set
    assert read.source == path.name


def test_objects_come_from_the_file_and_credentials_are_not_written(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text(FILE)
    stated = state_config(file, ["train.steps=7"])
    config = load_config(file, ["train.steps=7"], 2)
    write_resolved(tmp_path / "resolved.json", config, stated)
    assert "secret" not in (tmp_path / "resolved.json").read_text()
    here = state_config(file, ["train.steps=7"])
    read = read_resolved(tmp_path / "resolved.json", here)
    assert read.model is not None
    assert here.model is not None
    assert (read.model.type, read.data) == (here.model.type, here.data)
    assert read.model.options == here.model.options
    assert read.optimizer == config.optimizer
    assert isinstance(read.optimizer.options["betas"], tuple)
    assert read.hooks[0].options["add_to_row"].__name__ == "log"
    assert read.hooks[1].options["tracking_uri"] == "http://name:secret@host"
    assert (read.train, read.parallel) == (config.train, config.parallel)


def test_values_of_the_launcher_hold_without_another_search(tmp_path: Path) -> None:
    """A plan that the launcher has chosen: the file leaves it open in each rank."""
    values: dict[str, Any] = dict(parallel="auto", optimizer=dict(type="SGD", lr=0.1, momentum=0.5))
    stated = state_config(values)
    parallel = stated.parallel.model_copy(update={"auto": None, "data": 4})
    config = same(stated.model_copy(update={"parallel": parallel}), stated, tmp_path)
    assert (config.parallel.data, config.parallel.auto) == (4, None)


def test_a_file_that_says_something_else_in_a_rank_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file, resolved = tmp_path / "own.py", tmp_path / "resolved.json"
    file.write_text(FILE)
    write_resolved(resolved, load_config(file), state_config(file))
    monkeypatch.setenv("SEED", "4")
    monkeypatch.setenv("RANK", "0")
    file.write_text(FILE.replace("type=Net", "type=nn.Linear"))
    with pytest.raises(ConfigError) as raised:
        read_resolved(resolved, state_config(file))
    assert raised.value.source == "own.py"
    assert raised.value.problems[1:] == [
        "model.type: 'torch.nn.modules.linear:Linear' here, 'colossus_config_own:Net' in the launcher",
        "train.seed: 4 here, 3 in the launcher",
    ]
    assert read_resolved(resolved, state_config(file), is_restart=True).train.seed == 3
    assert "own.py has changed since the launch, whose values stay: model.type" in capsys.readouterr().err


def test_an_object_that_is_gone_is_refused(tmp_path: Path) -> None:
    stated = state_config(dict(data=[1, 2]))
    write_resolved(tmp_path / "resolved.json", stated, stated)
    assert json.loads((tmp_path / "resolved.json").read_text())["resolved"]["data"] == {"$": "object"}
    with pytest.raises(ConfigError, match=r"data: the config file has no object here.* put it back into the file"):
        read_resolved(tmp_path / "resolved.json", state_config({}), is_restart=True)


def test_a_nan_is_what_it_was(tmp_path: Path) -> None:
    stated = state_config(dict(data=dict(type="PythonStdlib", fill=float("nan"))))
    write_resolved(tmp_path / "resolved.json", stated, stated)
    assert math.isnan(read_resolved(tmp_path / "resolved.json", stated).data.fill)


def test_a_copy_that_the_disk_does_not_take_ends_nothing(tmp_path: Path) -> None:
    stated = state_config({})
    write_resolved(tmp_path / "resolved.json", stated, stated, tmp_path / "run" / "resolved.json")
    assert (tmp_path / "run" / "resolved.json").read_text() == (tmp_path / "resolved.json").read_text()
    (tmp_path / "taken").write_text("")
    write_resolved(tmp_path / "resolved.json", stated, stated, tmp_path / "taken" / "resolved.json")
    (tmp_path / "other" / "resolved.json").mkdir(parents=True)
    write_resolved(tmp_path / "resolved.json", stated, stated, tmp_path / "other" / "resolved.json")
    assert [path.name for path in (tmp_path / "other").iterdir()] == ["resolved.json"], "no draft stays"
