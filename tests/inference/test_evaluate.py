"""``colossus evaluate``: the number that the run has reported, under its plan and in one process; what is refused."""

from __future__ import annotations

import json
import math
import sys
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers.ranks import run_ranks
from helpers.tokenizer import TEXT, make_tokenizer
from helpers.twins import PlainGPT, PlainViT

import colossus
from colossus.checkpoint import read_state_dict
from colossus.checkpoint.folder import locate
from colossus.checkpoint.manifest import MANIFEST, read_manifest
from colossus.cli.main import main
from colossus.data import TextFolder
from colossus.engine.fit import fit

MODEL: dict[str, Any] = dict(type="GPT", num_layers=2, hidden_size=16, num_heads=4, vocab_size=256, seq_len=12)
STEPS, BATCH = 2, 4
#: world, parallel, microbatches, precision
PLANS: dict[str, tuple[int, dict[str, Any], int, str]] = {
    "one": (1, {}, 1, "fp64"),
    "zero": (2, dict(data=2, zero=3), 1, "fp64"),
    "tensor": (2, dict(tensor=2), 1, "fp32"),
    "pipeline": (2, dict(pipeline=2), 2, "fp64"),
    "2d": (4, dict(tensor=dict(mode="2d", size=4)), 1, "bf16"),
}


def train(rank: int, config: dict[str, Any], options: dict[str, Any]) -> float | None:
    engine = colossus.initialize(config, **options)
    loss = fit(engine).validation_loss
    engine.close()
    return loss


def write_text(root: Path) -> Path:
    folder = root / "text"
    if not folder.exists():
        folder.mkdir()
        for number in range(9):
            (folder / f"{number}.txt").write_text(f"{number} " + TEXT * (3 + number))
    return folder


def config_of(root: Path, name: str, **more: Any) -> dict[str, Any]:
    _, parallel, microbatches, precision = PLANS[name]
    config: dict[str, Any] = dict(
        parallel=parallel,
        model=MODEL,
        data=dict(type="TextFolder", path=str(write_text(root)), validation_fraction=0.2),
        schedule=dict(microbatches=microbatches),
        train=dict(steps=STEPS, global_batch_size=BATCH, precision=precision, eval_every=STEPS, eval_batches=3),
        checkpoint=dict(every=STEPS, dir=str(root / name)),
        device="cpu",
    )
    return {**config, **more}


def trained(root: Path, name: str, options: dict[str, Any] | None = None, **more: Any) -> float:
    """The validation loss that the run has reported; its checkpoint is in the folder of that name."""
    (reported, *_) = run_ranks(PLANS[name][0], train, config_of(root, name, **more), options or {}, with_context=False)
    return math.nan if reported is None else float(reported)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, float]]:
    root = tmp_path_factory.mktemp("runs")
    return root, {name: trained(root, name) for name in PLANS}


def evaluate(capsys: pytest.CaptureFixture[str], path: Path, *words: str) -> dict[str, Any]:
    capsys.readouterr()
    code = main(["evaluate", str(path), *words, "--json"])
    out, err = capsys.readouterr()
    assert code == 0, err
    found: dict[str, Any] = json.loads(out)
    return found


def refused(capsys: pytest.CaptureFixture[str], path: Path, *words: str, code: int = 2) -> str:
    capsys.readouterr()
    assert main(["evaluate", str(path), *words]) == code
    out, err = capsys.readouterr()
    assert not out
    return err


@pytest.mark.rest("2d", "zero")
@pytest.mark.parametrize("name", PLANS)
def test_the_number_that_the_run_reported(
    runs: tuple[Path, dict[str, float]], capsys: pytest.CaptureFixture[str], name: str
) -> None:
    """To the last bit under its plan; in one process to rounding."""
    root, reported = runs
    found = evaluate(capsys, root / name, "train.eval_batches=3")
    assert found["loss"] == reported[name]
    assert (found["step"], found["tokens"], found["split"]) == (STEPS, 3 * BATCH * MODEL["seq_len"], "validation")
    assert found["perplexity"] == math.exp(found["loss"])
    assert found["bits_per_byte"] == found["loss"] / math.log(2)
    tolerance = {"fp64": 1e-12, "fp32": 1e-6, "bf16": 1e-2}[PLANS[name][3]]
    alone = evaluate(capsys, root / name, "train.eval_batches=3", "--nproc", "1")
    assert alone["plan"].startswith("one process")
    assert alone["loss"] == pytest.approx(found["loss"], rel=tolerance)
    assert alone["tokens"] == found["tokens"]


def _options(config: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in config["model"].items() if name != "type"}


def test_all_of_the_data_as_plain_torch_has_it(
    runs: tuple[Path, dict[str, float]], capsys: pytest.CaptureFixture[str]
) -> None:
    """Every window once, of either split, a last smaller batch included, under other plans than that of the run."""
    root, _ = runs
    config = read_manifest(locate(root / "one")).config
    model = PlainGPT(**_options(config)).double()
    model.load_state_dict(read_state_dict(root / "one"))
    for split, plans in (("validation", [(), ("parallel.data=2",), ("parallel.tensor=2",)]), ("train", [()])):
        windows = TextFolder(root / "text", MODEL["seq_len"], split=split, validation_fraction=0.2)
        batch = windows.batch(np.arange(len(windows)))
        assert split == "train" or len(windows) % BATCH
        with torch.no_grad():
            logits = model(batch["inputs"])
            wanted = float(F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten()))
        for plan in plans:
            found = evaluate(capsys, root / "one", "--split", split, *plan)
            assert found["loss"] == pytest.approx(wanted, rel=1e-12)
            assert found["tokens"] == batch["labels"].numel()
            assert found["split"] == split


def test_other_data_and_other_numbers(
    runs: tuple[Path, dict[str, float]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root, _ = runs
    (tmp_path / "a.txt").write_text("something that the model has not seen " * 30)
    other = ["data.type=TextFolder", f"data.path={tmp_path}", "data.validation_fraction=0", "--split", "train"]
    found = evaluate(capsys, root / "zero", *other)
    assert found["tokens"] == (38 * 30 - 1) // 12 * 12
    assert found["loss"] > evaluate(capsys, root / "zero", "--nproc", "2")["loss"]
    smoothed = evaluate(capsys, root / "one", "model.label_smoothing=0.1")
    assert "perplexity" not in smoothed


def test_metrics_of_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Images, and how many were right, as plain torch counts them."""
    pytest.importorskip("sklearn")
    digits: dict[str, Any] = dict(num_layers=1, hidden_size=8, num_heads=2, patch_size=4, num_classes=10)
    model = dict(type="ViT", **digits, image_size=8, in_channels=1)
    trained(tmp_path, "one", model=model, data=dict(type="Digits"))
    found = evaluate(capsys, tmp_path / "one")
    plain: Any = PlainViT(**_options(read_manifest(locate(tmp_path / "one")).config)).double()
    plain.load_state_dict(read_state_dict(tmp_path / "one"))
    held = colossus.data.Digits(split="validation")
    batch = held.batch(np.arange(len(held)))
    with torch.no_grad():
        logits = plain(batch["inputs"].double())
    assert found["accuracy"] == float((logits.argmax(-1) == batch["labels"]).double().mean())
    assert found["loss"] == pytest.approx(float(F.cross_entropy(logits, batch["labels"])), rel=1e-12)
    assert found["images"] == len(held)
    assert "perplexity" not in found


def test_a_reference_has_the_weights_with_which_the_run_began(
    runs: tuple[Path, dict[str, float]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tuned = dict(objective=dict(type="distillation", label_weight=0.1), reference=dict())
    begin = dict(every=STEPS, dir=str(tmp_path / "one"), weights=str(runs[0] / "one"))
    reported = trained(tmp_path, "one", model={**MODEL, **tuned}, checkpoint=begin)
    numbers = evaluate(capsys, tmp_path / "one", "train.eval_batches=3")
    assert numbers["loss"] == reported
    file = config_of(tmp_path, "one", model={**MODEL, **tuned})  # a command has named the weights
    del file["checkpoint"]
    (tmp_path / "own.py").write_text("".join(f"{key} = {value!r}\n" for key, value in file.items()))
    from_file = evaluate(capsys, tmp_path / "one", "train.eval_batches=3", "--config", str(tmp_path / "own.py"))
    assert from_file["loss"] == reported
    assert "perplexity" not in numbers
    assert "bits_per_byte" not in numbers


def test_a_folder_of_hugging_face(
    runs: tuple[Path, dict[str, float]], tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """The same as the checkpoint that it was written from; on text of its own tokens."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    text = write_text(tmp_path)
    tokenizer = make_tokenizer(tmp_path / "tokens")
    data = dict(type="TextFolder", path=str(text), tokenizer=str(tokenizer))
    trained(tmp_path, "one", model={**MODEL, "vocab_size": 300, "mlp": "gelu_tanh"}, data=data)
    assert main(["checkpoint", "convert", str(tmp_path / "one"), str(tmp_path / "hf"), "--to", "hf"]) == 0
    assert "data, such as data.type=TextFolder data.path=..., or --config FILE" in refused(capsys, tmp_path / "hf")
    wanted = evaluate(capsys, tmp_path / "one")
    tokenizer.unlink()  # each folder has its own
    assert evaluate(capsys, tmp_path / "one") == {**wanted, "seconds": pytest.approx(wanted["seconds"], abs=60)}
    given = ["data.type=TextFolder", f"data.path={text}"]
    found = evaluate(capsys, tmp_path / "hf", *given, f"train.global_batch_size={BATCH}")
    assert found["loss"] == pytest.approx(wanted["loss"], rel=1e-12)
    assert found["tokens"] == wanted["tokens"]
    assert "bits_per_byte" not in found
    as_bytes = evaluate(capsys, tmp_path / "hf", *given, "data.tokenizer=bytes", f"train.global_batch_size={BATCH}")
    assert as_bytes["tokens"] > found["tokens"]
    whole = f"dict(type='TextFolder', path={str(text)!r}, tokenizer='bytes')"
    (tmp_path / "own.py").write_text(f"model = dict(type='hf', path={str(tmp_path / 'hf')!r})\ndata = {whole}\n")
    own = evaluate(capsys, tmp_path / "hf", "--config", str(tmp_path / "own.py"), f"train.global_batch_size={BATCH}")
    assert own["tokens"] == as_bytes["tokens"]  # as the file says
    (tmp_path / "hf" / "tokenizer.json").unlink()
    assert "it is unknown how text becomes the ids" in refused(capsys, tmp_path / "hf", *given)


# -- what is refused --------------------------------------------------------------------------------------------


def test_data_that_a_checkpoint_cannot_give(
    runs: tuple[Path, dict[str, float]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root, _ = runs
    held = TextFolder(write_text(tmp_path), 12)
    trained(tmp_path, "one", {"data": held}, data=None)
    assert "records no data, since the run got its data from code" in refused(capsys, tmp_path / "one")
    given = ["data.type=TextFolder", f"data.path={tmp_path / 'text'}"]
    assert evaluate(capsys, tmp_path / "one", *given)["tokens"]
    trained(tmp_path, "tensor", data=held)
    assert "its data is <colossus.data.text:TextFolder>, none of colossus" in refused(capsys, tmp_path / "tensor")
    words = refused(capsys, root / "one", "data.validation_fraction=0")
    assert "there is no validation data: none (TextFolder" in words
    assert "--split train evaluates the training data" in words
    assert "model.vocab_size = 200" in refused(capsys, root / "one", "model.vocab_size=200")


def test_wrong_usage(
    runs: tuple[Path, dict[str, float]], tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Each in words, before a process starts; damaged checkpoints with 1."""
    root, _ = runs
    assert "model.num_layers" in refused(capsys, root / "one", "parallel.pipeline=9")
    assert "there is no such folder" in refused(capsys, tmp_path / "nowhere")
    assert "it does not fit the model" in refused(capsys, root / "zero", "model.hidden_size=32")
    with monkeypatch.context() as launched:
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            launched.setenv(name, "1")
        assert "run it by itself, without torchrun or srun" in refused(capsys, root / "one")


def test_nothing_that_a_manifest_names_is_imported(
    runs: tuple[Path, dict[str, float]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever it says: of the model, the data, how that is read, schedules, strategies, hooks, optimizers."""
    root, _ = runs
    source = locate(root / "pipeline")
    (tmp_path / "planted.py").write_text("raise SystemExit('imported')")
    for section, value, is_refused in (
        ("model", {"type": "planted:Net"}, True),
        ("model", {"type": "torch", "factory": "planted:net"}, True),
        ("data", {"type": "planted:Data"}, True),
        ("data", "<planted:Data>", True),
        ("data", {"type": "TextFolder", "path": "x", "collate_fn": "planted:collate"}, True),
        ("data", {"type": "TextFolder", "path": "x", "validation": {"type": "planted:Data"}}, True),
        ("optimizer", {"type": "planted:Adam", "lr": 0.1}, False),
        ("schedule", {"type": "planted:schedule", "microbatches": 2}, False),
        ("parallel", {"data": 2, "strategy": {"type": "planted:Gossip"}}, False),
    ):
        body = json.loads((source / MANIFEST).read_bytes())["manifest"]
        body["config"][section] = value
        folder = tmp_path / "step-00000009"
        folder.mkdir(exist_ok=True)
        for file in source.iterdir():
            (folder / file.name).write_bytes(file.read_bytes())
        text = json.dumps(body).encode()
        (folder / MANIFEST).write_bytes(b'{"crc32": "%08x", "manifest": ' % zlib.crc32(text) + text + b"}\n")
        if is_refused:
            assert "colossus never imports code that a checkpoint names" in refused(capsys, folder)
        else:
            assert evaluate(capsys, folder, "train.eval_batches=1")["tokens"] == BATCH * MODEL["seq_len"]
    assert "planted" not in sys.modules
