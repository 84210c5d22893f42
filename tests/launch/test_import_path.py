"""Modules that the processes of a run import: their own colossus, the standard library, and what is the user's."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from helpers.launching import environment, finish, start

from colossus.config.loading import read_file
from colossus.config_module import put_on_path
from colossus.python_process import python_words

#: of the current folder, from which a run is launched
MODULES = {
    "colossus/__init__.py": "",  # a clone of another version
    "queue.py": "raise RuntimeError('imported as the one of the standard library')",
    "mine/__init__.py": "",
    "mine/net.py": """
from torch import nn
class Net(nn.Linear):
    def __init__(self): super().__init__(4, 3)
    def loss(self, outputs, batch): return (outputs * batch["labels"]).sum(), len(outputs)
""",
    "configs/random.py": "raise RuntimeError('imported as the one of the standard library')",
    "configs/beside.py": """
import torch
class Data:
    def __len__(self): return 8
    def __getitem__(self, index): return {"inputs": torch.full((4,), float(index)), "labels": torch.ones(3)}
""",
    # of the name of a module of the standard library
    "configs/profile.py": """
from beside import Data
from mine.net import Net
class Mine(Data): pass
parallel = dict(data=2)
model = dict(type=Net)
data = dict(type=Mine, num_workers=1, multiprocessing_context="spawn")
train = dict(steps=2, global_batch_size=4)
optimizer = dict(type="SGD", lr=0.1)
device = "cpu"
""",
}
#: what pip installs as the command
COMMAND = "import sys\nfrom colossus.cli.main import main\nsys.exit(main())\n"


@pytest.fixture
def above(tmp_path: Path) -> Path:
    """A current folder with modules that are named as others."""
    for name, text in MODULES.items():
        (tmp_path / "above" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "above" / name).write_text(text)
    return tmp_path / "above"


def test_a_process_of_a_run_imports_the_colossus_that_has_started_it(above: Path) -> None:
    words = python_words("colossus.cli.main", "config", "configs/plain.py")
    (above / "configs" / "plain.py").write_text("import queue, random, os\nname = os.path.basename(random.__file__)")
    done = subprocess.run(words, cwd=above, env=environment(PYTHONPATH=""), capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "random.py" in done.stdout


def test_a_config_imports_what_is_beside_it_and_in_the_current_folder(
    above: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library, others = str(Path(subprocess.__file__).parent), [str(above / "installed")]
    monkeypatch.chdir(above)
    for before in ([str(above), library, *others], [library, *others], [str(above / "configs"), *others, library]):
        monkeypatch.setattr(sys, "path", list(before))
        monkeypatch.delitem(sys.modules, "mine", raising=False)
        (above / "configs" / "plain.py").write_text("import mine")
        put_on_path()
        read_file(Path("configs/plain.py"))
        assert sys.path == [library, str(above / "configs"), str(above), *others]
    monkeypatch.setattr(sys, "path", [str(above)])
    gone = above / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    put_on_path()  # of a current folder that is not there any more
    assert sys.path == [str(above)]


@pytest.mark.long
@pytest.mark.parametrize("words", [["-m", "colossus"], ["../bin/colossus"]], ids=["module", "command"])
def test_a_run_is_launched_from_above_a_clone(above: Path, words: list[str]) -> None:
    """With data loader workers that begin with an interpreter of their own."""
    (above.parent / "bin").mkdir()
    (above.parent / "bin" / "colossus").write_text(COMMAND)
    if words[0] == "-m":  # which Python itself looks for in the current folder
        (above / "colossus" / "__init__.py").unlink()
    command = [sys.executable, *words, "launch", "configs/profile.py"]
    code, out, err = finish(start(command, above, new_python=True))
    assert code == 0, err
    assert "done: 2 steps" in out
