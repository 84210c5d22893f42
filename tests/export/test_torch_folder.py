"""``colossus checkpoint convert --to torch``: it runs where colossus is not, and gives what the engine gives."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.ranks import run_ranks
from safetensors import safe_open
from torch import Tensor

import colossus
from colossus import layers
from colossus.checkpoint.folder import locate
from colossus.checkpoint.manifest import MANIFEST
from colossus.cli.main import main
from colossus.export import torch_modules

SIZES: dict[str, Any] = dict(num_layers=2, hidden_size=16, num_heads=4)
TEXT: dict[str, Any] = dict(**SIZES, vocab_size=53, seq_len=12)
MODELS: dict[str, dict[str, Any]] = {
    "gpt": dict(type="GPT", **TEXT, dropout=0.1, attention_dropout=0.2),
    "gpt2": dict(type="GPT", **TEXT, mlp="gelu_tanh", tie_embeddings=False),
    "rotary": dict(type="GPT", **TEXT, positions="rotary", norm="rmsnorm", mlp="swiglu", bias=False),
    "llama": dict(type="Llama", **TEXT, num_kv_heads=2, head_dim=6, rotary_base=500.0,
                  rotary_scaling=dict(factor=4.0, original_max_position_embeddings=16)),
    "vit": dict(type="ViT", **SIZES, image_size=(8, 12), patch_size=(4, 3), num_classes=7),
    "vit_mean": dict(type="ViT", **SIZES, image_size=8, patch_size=4, in_channels=1, num_classes=7, pool="mean"),
}  # fmt: skip


def batch_of(options: dict[str, Any]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(5)
    if options["type"] != "ViT":
        ids = torch.randint(0, 53, (4, 12), generator=generator)
        return {"inputs": ids, "labels": ids}
    size, channels = options["image_size"], options.get("in_channels", 3)
    high, wide = size if isinstance(size, tuple) else (size, size)
    images = torch.randn(4, channels, high, wide, generator=generator, dtype=torch.float64)
    return {"inputs": images, "labels": torch.arange(4)}


def write(rank: int, root: Path, precision: str, plan: dict[str, Any]) -> dict[str, tuple[Tensor, Tensor]]:
    """Trains each model for a step and saves it; logits in eval mode of the engine's model and of the plain one."""
    found = {}
    for name, options in MODELS.items():
        engine = colossus.initialize(
            dict(
                parallel=plan,
                model=options,
                train=dict(global_batch_size=4, precision=precision),
                checkpoint=dict(dir=str(root / name)),
                device="cpu",
            )
        )
        batch = batch_of(options)
        engine.train_step(batch)
        engine.checkpoints.save(background=False).wait()
        plain = colossus.plain(engine).eval()
        engine.model.eval()
        with torch.no_grad(), engine.context:
            inputs = batch["inputs"].to(next(plain.parameters()).dtype) if options["type"] == "ViT" else batch["inputs"]
            found[name] = layers.to_whole(engine.model(inputs)), plain(inputs)
        engine.close()
    return found


@pytest.fixture(scope="module", params=["fp64", "fp32"])
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], str]:
    root = tmp_path_factory.mktemp(request.param)
    plan = dict(tensor=2) if request.param == "fp64" else {}
    found, *_ = run_ranks(2 if plan else 1, write, root, request.param, plan, with_context=False)
    for name in MODELS:
        assert main(["checkpoint", "convert", str(root / name), str(root / f"{name}.torch"), "--to", "torch"]) == 0
    return root, found, request.param


#: what a machine without colossus runs: every import of it fails
PROGRAM = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("colossus", "pydantic", "safetensors", "transformers"):
            raise ModuleNotFoundError(f"{name} is not installed here")
sys.meta_path.insert(0, Blocked())
import torch
torch.set_num_threads(1)
sys.path.insert(0, "")
from importlib import import_module, util
logits = {}
for name in sys.argv[1:]:
    spec = util.spec_from_file_location("model", f"{name}.torch/model.py")
    module = util.module_from_spec(spec)
    spec.loader.exec_module(module)
    m = module.load()
    assert not m.training and all(not each.training for each in m.modules())
    inputs = torch.load(f"{name}.pt", weights_only=True)
    with torch.no_grad():
        logits[name] = m(inputs)
torch.save(logits, "logits.pt")
"""


def test_it_runs_without_colossus(saved: tuple[Path, dict[str, Any], str]) -> None:
    root, found, precision = saved
    inputs = {name: batch_of(options)["inputs"] for name, options in MODELS.items()}
    if precision == "fp64":
        for name, each in inputs.items():
            torch.save(each, root / f"{name}.pt")
        command = [sys.executable, "-I", "-B", "-c", PROGRAM, *MODELS]
        told = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
        assert told.returncode == 0, told.stderr
        logits = torch.load(root / "logits.pt", weights_only=True)
    else:  # the same file, without the seconds that a new Python takes to import torch
        inputs = {name: each.float() if each.is_floating_point() else each for name, each in inputs.items()}
        logits = {name: torch_modules.load(root / f"{name}.torch")(each).detach() for name, each in inputs.items()}
    tolerance = 1e-12 if precision == "fp64" else 1e-6
    for name, (wanted, plain) in found.items():
        torch.testing.assert_close(plain, wanted, rtol=tolerance, atol=tolerance, msg=f"plain {name}")
        torch.testing.assert_close(logits[name], plain, rtol=0, atol=0, msg=name)


def test_what_is_in_the_folder(saved: tuple[Path, dict[str, Any], str]) -> None:
    """Tied parameters once, the rates of dropout, and the file of modules as it stands in colossus."""
    root, _, _ = saved
    folder = root / "gpt.torch"
    assert sorted(os.listdir(folder)) == ["config.json", "model.py", "model.safetensors"]
    with safe_open(folder / "model.safetensors", "pt") as file:
        assert "head.weight" not in file.keys()  # noqa: SIM118
    model: Any = torch_modules.load(folder, dtype=torch.bfloat16)
    assert model.head.weight is model.embedding.weight
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert (model.dropout.p, model.blocks[0].attention.dropout.p) == (0.1, 0.2)
    assert all(parameter.requires_grad for parameter in model.parameters())


def imports_of(path: Path) -> set[str]:
    return {
        line.split()[1].partition(".")[0]
        for line in path.read_text().splitlines()
        if line.startswith(("import ", "from "))
    }


def test_the_file_of_modules_imports_torch_alone() -> None:
    found = imports_of(Path(torch_modules.__file__))
    assert found - set(sys.stdlib_module_names) == {"torch"}


def refuse(capsys: pytest.CaptureFixture[str], source: Path, target: Path) -> str:
    assert main(["checkpoint", "convert", str(source), str(target), "--to", "torch"]) == 2
    assert not target.exists()
    return capsys.readouterr().err


def test_what_cannot_be_written(
    saved: tuple[Path, dict[str, Any], str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is left behind."""
    root, _, _ = saved
    source = locate(root / "gpt")
    manifest = (source / MANIFEST).read_text()

    def damaged(old: str, new: str) -> Path:
        folder = tmp_path / f"step-{len(list(tmp_path.iterdir())):08d}"
        folder.mkdir()
        for file in source.glob("*.safetensors"):
            os.link(file, folder / file.name)
        text = json.dumps(json.loads(manifest)["manifest"]).replace(old, new)
        assert old == new or new in text
        (folder / MANIFEST).write_bytes(b'{"crc32": "%08x", "manifest": ' % crc(text) + text.encode() + b"}\n")
        return folder

    told = refuse(capsys, damaged('"type": "GPT"', '"type": "mine:Net"'), tmp_path / "out")
    assert "no model of type 'mine:Net' here; known: GPT, Llama, ViT, WordsLM; colossus.plain(engine) gives" in told
    told = refuse(capsys, damaged('"vocab_size": 53', '"vocab_size": 54'), tmp_path / "out")
    words = r"2 of its tensors are not those of its config's GPT, embedding.weight say: \(53, 16\) is saved, the model"
    assert re.search(words + r" has \(54, 16\)", told)
    assert "is there already" in refuse_existing(capsys, source, root / "gpt.torch")
    told = refuse_existing(capsys, source, tmp_path / "out", "--max-shard-size", "1KB")
    assert "--max-shard-size: --to torch writes one file" in told
    assert not (tmp_path / "out").exists()


def refuse_existing(capsys: pytest.CaptureFixture[str], source: Path, target: Path, *more: str) -> str:
    assert main(["checkpoint", "convert", str(source), str(target), "--to", "torch", *more]) == 2
    return capsys.readouterr().err


def crc(text: str) -> int:
    import zlib

    return zlib.crc32(text.encode())
