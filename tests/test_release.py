"""The wheel and the source distribution have every file of the package, and train where there is no clone."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest
import yaml

import colossus

ROOT = Path(colossus.__file__).parents[1]
BUILD = "import sys; from setuptools import build_meta as b; out = sys.argv[1]; b.build_sdist(out); b.build_wheel(out)"


def _tracked() -> list[str]:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    return listed.stdout.splitlines()


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with both distributions, built from a copy of the tracked files."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("built")
    for name in _tracked():
        if not name.startswith(("tests/", "docs/", "benchmarks/")):
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, source / name, follow_symlinks=False)
    words = [sys.executable, "-c", BUILD, str(out)]
    done = subprocess.run(words, cwd=source, env=_environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return out


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PIP_"))}


def _wanted() -> set[str]:
    package = {name for name in _tracked() if name.startswith("colossus/")} - {"colossus/configs"}
    return package | {f"colossus/{name}" for name in _tracked() if name.startswith("configs/")}


def test_the_distributions_have_every_file(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    assert wheel.name == f"colossus-{colossus.__version__}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        assert names == _wanted()
        licence = archive.read(f"colossus-{colossus.__version__}.dist-info/licenses/LICENSE")
        mlp = archive.read("colossus/configs/mlp.py")
    assert licence == (ROOT / "LICENSE").read_bytes()
    assert mlp == (ROOT / "examples" / "mlp.py").read_bytes()
    (source,) = built.glob("*.tar.gz")
    with tarfile.open(source) as archive:
        members = {member.name.partition("/")[2]: member for member in archive.getmembers()}
    assert members.keys() >= _wanted() | {"LICENSE", "README.md", "CHANGELOG.md", "CITATION.cff", "SECURITY.md"}
    assert not any(name.startswith("tests/") for name in members)
    assert all(member.isfile() or member.isdir() for member in members.values())


def test_the_version_is_said_once() -> None:
    version = colossus.__version__
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == version
    newest = re.findall(r"^## \[(\d.*?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[0]
    assert newest == version
    assert version not in (ROOT / "pyproject.toml").read_text().partition("[project.optional")[0]


@pytest.mark.long
@pytest.mark.parametrize("kind", ["*.whl", "*.tar.gz"])
def test_an_installation_trains_without_the_clone(kind: str, built: Path, tmp_path: Path) -> None:
    (distribution,) = built.glob(kind)
    python, packages = _empty_environment(tmp_path / "venv")
    words = ["-m", "pip", "--python", str(python), "install", "--no-deps", "--no-build-isolation", str(distribution)]
    _run(tmp_path, sys.executable, *words)
    where = _run(tmp_path, str(python), "-c", "import colossus; print(colossus.__file__)")
    assert where.strip() == str(packages / "colossus" / "__init__.py")
    command = str(python.parent / "colossus")
    assert _run(tmp_path, command, "--version") == f"colossus {colossus.__version__}\n"
    _run(tmp_path, command, "new", "mine")
    assert "done: 4 steps" in _run(tmp_path, command, "launch", "mine/config.py", "train.steps=4", "parallel.tensor=2")
    _run(tmp_path, command, "new", "gpt", "--from", "gpt_stdlib")
    short = ["train.steps=3", "train.eval_every=0", "checkpoint.every=3"]
    out = _run(tmp_path, command, "launch", "gpt/config.py", *short, "--run-dir", "runs/gpt")
    assert "data 2 x tensor 2, 4 processes" in out
    words = ["-m", "torch.distributed.run", "--nproc-per-node", "4", "gpt/train.py", *short]
    loss = re.search(r"step 3/3: loss ([\d.]+)", _run(tmp_path, str(python), *words))
    assert loss is not None
    assert f"loss {loss[1]}" in out


def _empty_environment(folder: Path) -> tuple[Path, Path]:
    """Make an environment that has what colossus needs, from the one of the tests, but no colossus."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    packages = folder / "lib" / f"python{sysconfig.get_python_version()}" / "site-packages"
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder / "bin" / "python", packages


def _run(folder: Path, *words: str) -> str:
    done = subprocess.run(words, cwd=folder, env=_environment(), capture_output=True, text=True)
    assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
    return done.stdout
