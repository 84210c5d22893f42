"""``colossus checkpoint``: what it prints of checkpoints that are whole, damaged, or none, and its exit codes."""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.permissions import permissions_count
from helpers.ranks import run_ranks
from helpers.training import BATCH, batch_of, config_of

import colossus
from colossus.checkpoint import diff as diffing
from colossus.checkpoint.describe import describe
from colossus.checkpoint.errors import CheckpointError, DamagedCheckpoint
from colossus.checkpoint.folder import find_latest
from colossus.checkpoint.manifest import MANIFEST, read_manifest
from colossus.checkpoint.reader import CheckpointReader
from colossus.checkpoint.weight_sources import find_weights
from colossus.cli.main import main

REPOSITORY = Path(__file__).parents[2]


def _saves(rank: int, root: str, plan: dict[str, Any], seed: int) -> None:
    config = config_of(plan, 2, "fp64", train=dict(seed=seed), checkpoint=dict(dir=f"{root}/checkpoints"))
    engine = colossus.initialize(config)
    index, part = engine.context.index("data"), BATCH // engine.context.size("data")
    for step in range(2):
        batch = batch_of(step)
        engine.train_step({key: value[index * part : (index + 1) * part] for key, value in batch.items()})
        engine.checkpoints.save(background=False).wait()
    engine.close()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run folders: one process, tensor 2 of the same run, one process of another seed; steps 1 and 2 of each."""
    root = tmp_path_factory.mktemp("runs")
    for name, world, plan, seed in (("one", 1, {}, 3), ("tensor", 2, dict(tensor=2), 3), ("other", 1, {}, 4)):
        run_ranks(world, _saves, str(root / name), plan, seed, with_context=False)
    return root


@pytest.fixture
def runs(saved: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    shutil.copytree(saved, tmp_path / "runs")
    return tmp_path / "runs"


def step(run: Path, number: int = 2) -> Path:
    return run / "checkpoints" / f"step-{number:08d}"


def checkpoint(*words: object) -> int:
    return main(["checkpoint", *map(str, words)])


Captured = pytest.CaptureFixture[str]


# permissions


@pytest.mark.parametrize("name", ["", MANIFEST, "rank-00000.safetensors"])
@pytest.mark.parametrize("has_pointer", [True, False])
def test_what_may_not_be_read_is_not_called_damaged(name: str, has_pointer: bool, runs: Path, capsys: Captured) -> None:
    """Nor is an older one taken in its place."""
    root = step(runs / "one").parent
    if not has_pointer:
        (root / "latest").unlink()
    (step(runs / "one") / name).chmod(0o000)
    with permissions_count():
        for command in (("verify",), ("inspect",), ("convert", runs / "new", "--to", "colossus")):
            assert checkpoint(command[0], runs / "one", *command[1:]) == 2
            err = capsys.readouterr().err
            assert "Permission denied" in err
            assert "damaged" not in err
        with pytest.raises(CheckpointError, match=r"step-00000002.*: cannot be read: Permission denied") as refused:
            find_latest(root)
    assert not isinstance(refused.value, DamagedCheckpoint)
    (step(runs / "one") / name).chmod(0o700)
    assert find_latest(root) == step(runs / "one")


def test_a_model_folder_that_may_not_be_read(tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "config.json").chmod(0o000)
    with permissions_count():
        assert checkpoint("inspect", tmp_path) == 2
        assert f"{tmp_path / 'config.json'}: cannot be read: Permission denied" in capsys.readouterr().err
        with pytest.raises(CheckpointError, match="Permission denied"):
            find_weights(tmp_path)


# inspect


def test_inspect_prints_a_table(saved: Path, capsys: Captured) -> None:
    assert checkpoint("inspect", saved / "tensor") == 0
    out, err = capsys.readouterr()
    assert not err
    head, table = out.split("\n\n", 1)
    assert head.startswith(str(step(saved / "tensor")))
    lines = {line.split()[0]: line for line in head.splitlines()[1:]}
    assert lines["step"].split() == ["step", "2"]
    assert "tensor 2" in lines["plan"]
    assert f"torch {torch.__version__}" in lines["saved"]
    assert "16,056 numbers, 128 KB in 36 tensors (float64)" in lines["model"]
    assert "32,148 numbers" in lines["optimizer"]
    rows = [line.split() for line in table.splitlines()]
    assert ["embedding.weight", "1", "53", "x", "24", "float64", "1,272", "10.2", "KB"] in rows
    # those of both layers; the full shape, though two ranks had halves
    query = "blocks.*.attention.qkv.query.weight"
    assert [query, "2", "24", "x", "24", "float64", "1,152", "9.22", "KB"] in rows
    assert ["head.weight", "is", "embedding.weight"] in rows


def test_inspect_all_has_a_row_for_each_tensor(saved: Path, capsys: Captured) -> None:
    assert checkpoint("inspect", "--all", step(saved / "tensor")) == 0
    out = capsys.readouterr().out
    assert sum(".query.weight" in line for line in out.splitlines()) == 2 * (1 + 3)  # of optimizer state, too


def test_inspect_of_ten_thousand_layers_is_short_and_obeys_no_escape(saved: Path) -> None:
    manifest = read_manifest(step(saved / "one"))
    one = manifest.tensors["model/norm.weight"]
    many = {f"model/layers.{number}.norm.weight": one for number in range(10_000)}
    text = describe(saved, replace(manifest, tensors={**many, "model/\x1b[2Jname": one, "model/" + "a." * 5000: one}))
    assert len(text) < 50_000
    assert "layers.*.norm.weight" in text
    assert "\\x1b[2Jname" in text
    assert "\x1b" not in text


# verify


def test_verify_all(runs: Path, capsys: Captured) -> None:
    assert checkpoint("verify", "--all", runs / "tensor") == 0
    out, err = capsys.readouterr()
    assert out.count(" is whole: ") == 2
    assert f"{step(runs / 'tensor')} is whole: step 2, 2 files, " in out
    assert not err  # no progress where nobody watches
    (step(runs / "tensor", 1) / MANIFEST).unlink()
    assert checkpoint("verify", "--all", runs / "tensor" / "checkpoints") == 1
    out, err = capsys.readouterr()
    assert out.startswith(f"{step(runs / 'tensor', 2)} is whole")
    assert str(step(runs / "tensor", 1)) in err


def _flip(path: Path, at: int = -9) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


DAMAGES: dict[str, Any] = {
    "a bit": (lambda folder: _flip(folder / "rank-00001.safetensors"), "rank-00001.safetensors is corrupted"),
    "missing": (lambda folder: (folder / "rank-00001.safetensors").unlink(), "rank-00001.safetensors is missing"),
    "manifest": (lambda folder: _flip(folder / MANIFEST, 400), "manifest.json: is truncated or corrupted"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_is_damaged_is_named(damage: str, runs: Path, capsys: Captured) -> None:
    folder = step(runs / "tensor")
    harm, said = DAMAGES[damage]
    harm(folder)
    assert checkpoint("verify", folder) == 1
    out, err = capsys.readouterr()
    assert said in err
    assert str(folder) in err
    assert "whole" not in out
    # of the run, the one is verified from which it would resume; that something is damaged stays true
    assert checkpoint("verify", runs / "tensor") == 1
    out, err = capsys.readouterr()
    if damage == "a bit":  # whose sizes are right: it is the one that is read
        assert f"{folder} is damaged: 1 of 2 files" in err
        return
    assert out.startswith(f"{step(runs / 'tensor', 1)} is whole")
    assert err.startswith("damaged: ")
    assert checkpoint("inspect", runs / "tensor") == 0
    assert f"{step(runs / 'tensor', 1)} instead" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["inspect", "verify", "diff"])
def test_no_checkpoint(command: str, saved: Path, tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    for given, said in (
        (tmp_path / "absent", "there is no such folder"),
        (tmp_path, "is neither a checkpoint"),
        (tmp_path / "notes.txt", "is neither a checkpoint"),
    ):
        more = [saved / "one"] if command == "diff" else []
        assert checkpoint(command, given, *more) == 2
        out, err = capsys.readouterr()
        assert not out
        assert err.startswith(f"colossus: {given}: {said}")


def test_a_run_by_its_name(runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    """The newest that has a checkpoint, as ``--resume`` takes it; a path of that name comes first."""
    monkeypatch.chdir(runs.parent)
    (runs / "one").rename(runs / "gpt-20260101-000000")
    (runs / "tensor").rename(runs / "gpt-20260102-000000")
    (runs / "gpt-20260103-000000").mkdir()
    assert checkpoint("verify", "gpt") == 0
    assert capsys.readouterr().out.startswith(f"{step(Path('runs') / 'gpt-20260102-000000')} is whole: ")
    assert checkpoint("verify", "--all", "gtp") == 2
    assert "gtp: no such path, and there is no run in runs/gtp-*" in capsys.readouterr().err
    (runs / "other").rename("gpt")
    assert checkpoint("verify", "gpt") == 0
    assert capsys.readouterr().out.startswith(str(step(Path("gpt"))))


# diff


def test_diff_of_plans(saved: Path, capsys: Captured) -> None:
    """The same run under two plans: rounding, and a plan that differs; the generators of ranks are not compared."""
    assert checkpoint("diff", saved / "one", step(saved / "one")) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("equal: ")
    assert checkpoint("diff", saved / "one", saved / "tensor") == 3
    out = capsys.readouterr().out
    assert "ranks/" not in out
    assert "parallel.tensor.size: 1 in A, 2 in B" in out
    assert "\nstate" not in out
    assert checkpoint("diff", saved / "one", saved / "tensor", "--tolerance", "1e-9", "--absolute", "1e-14") == 0
    out = capsys.readouterr().out
    assert "differ within the tolerance" in out.splitlines()[-1]
    assert checkpoint("diff", saved / "one", saved / "tensor", "--tolerance", "1e-17") == 3


def test_diff_of_steps(saved: Path, capsys: Captured) -> None:
    one, two = step(saved / "one", 1), step(saved / "one", 2)
    assert checkpoint("diff", one, two) == 3
    out = capsys.readouterr().out
    assert "\n  step: 1 in A, 2 in B\n" in out
    assert "optimizer_groups/0.now.0.lr: 5e-05 in A, 0.0001 in B" in out
    assert "more: --all prints them" in out
    assert 0 < out.index("\ntensors that differ, ") < out.index("\nstate: ")
    assert checkpoint("diff", one, two, "--all", "--only", "model/*") == 3
    found = capsys.readouterr().out
    line = next(line for line in found.splitlines() if line.startswith("  model/norm.weight:"))
    a, b = (CheckpointReader(each).tensor("model/norm.weight") for each in (one, two))
    gap = (a - b).abs().max().item()
    assert line == f"  model/norm.weight: {gap:.3g}, {gap / max(a.abs().max(), b.abs().max()).item():.3g}; " \
                   f"{int((a != b).sum())} of 24 elements"  # fmt: skip
    assert "optimizer" not in found
    assert checkpoint("diff", one, two, "--only", "step") == 3
    assert checkpoint("diff", one, two, "--only", "stp") == 2
    assert "--only stp matches no key" in capsys.readouterr().err


def test_diff_of_names_shapes_and_dtypes(saved: Path, capsys: Captured) -> None:
    """What a checkpoint lacks, and what it has otherwise, from manifests of one's own."""
    with CheckpointReader(step(saved / "one")) as a, CheckpointReader(step(saved / "one")) as b:
        tensors = dict(a.manifest.tensors)
        weight = tensors.pop("model/norm.weight")
        tensors["model/norm.scale"] = weight
        tensors["model/norm.bias"] = replace(weight, shape=(12, 2))
        tensors["model/blocks.0.mlp_norm.bias"] = replace(weight, dtype="int64")
        b.manifest = replace(b.manifest, tensors=tensors, aliases={})
        found = diffing.diff(a, b)
    assert found.only_in_a == ["model/norm.weight"]
    assert found.only_in_b == ["model/norm.scale"]
    of = {each.key: each for each in found.tensors}
    assert of.keys() == {"model/norm.bias", "model/blocks.0.mlp_norm.bias"}
    assert of["model/norm.bias"].spec == "float64 (24,), float64 (12, 2)"
    assert of["model/blocks.0.mlp_norm.bias"].spec == "float64, int64"
    assert found.exceeds(1e9, 1e9)


def test_diff_holds_one_block_of_each(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[int] = []
    read = diffing._read

    def counted(*args: Any) -> Any:
        held.append((out := read(*args)).numel())
        return out

    monkeypatch.setattr(diffing, "_read", counted)
    monkeypatch.setattr(diffing, "BLOCK_ELEMENTS", 100)
    with CheckpointReader(step(saved / "one")) as a, CheckpointReader(step(saved / "other")) as b:
        small = diffing.diff(a, b)
        assert max(held) <= 100
        monkeypatch.setattr(diffing, "BLOCK_ELEMENTS", 1 << 20)
        assert diffing.diff(a, b) == small  # the largest element is that of the whole tensor


# the command line


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ([], 2, "the following arguments are required: COMMAND"),
        (["inspekt", "x"], 2, "invalid choice: 'inspekt' (choose from 'inspect', "),
        (["inspect", "x", "--jsn"], 2, "unrecognized arguments: --jsn"),
        (["diff", "x", "y", "--tolerance", "-1"], 2, "must be a number, 0 or more"),
    ],
)
def test_usage(words: list[str], code: int, said: str, capsys: Captured) -> None:
    assert checkpoint(*words) == code
    assert said in capsys.readouterr().err


def test_answers_without_importing_torch(saved: Path) -> None:
    lines = [["checkpoint", command, str(saved / "one")] for command in ("inspect", "verify")]
    code = (
        f"import sys; from colossus.cli.main import main; sys.exit(any(map(main, {lines})) or 'torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY).returncode == 0
