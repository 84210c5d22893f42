"""Averages of weights in checkpoints: resumed to the bit, under any plan, and taken in the place of the weights."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.checkpoints import same_bits
from helpers.ranks import run_ranks
from helpers.resumed import Listener
from helpers.tokenizer import TEXT
from helpers.twins import PlainGPT
from torch import Tensor

import colossus
from colossus.checkpoint import CheckpointError, full_state_dict, read_state_dict
from colossus.checkpoint.folder import name_of
from colossus.checkpoint.reader import CheckpointReader
from colossus.cli.main import main
from colossus.engine.fit import fit
from colossus.monitor.hooks.averages import EMA, SWA

STEPS, HALF, BATCH = 10, 5, 4
MODEL: dict[str, Any] = dict(
    type="GPT", num_layers=2, hidden_size=16, num_heads=4, vocab_size=256, seq_len=12, mlp="gelu_tanh"
)
ZERO: dict[str, Any] = dict(data=2, zero=3)


def config_of(root: Path, name: str, parallel: dict[str, Any], **checkpoint: Any) -> dict[str, Any]:
    return dict(
        parallel=parallel,
        model=MODEL,
        data=dict(type="TextFolder", path=str(root / "text"), validation_fraction=0.2),
        optimizer=dict(type="AdamW", lr=1e-2),
        train=dict(steps=STEPS, global_batch_size=BATCH, precision="fp64", eval_every=HALF, eval_batches=2),
        checkpoint=dict(every=HALF, keep_last=0, dir=str(root / name), **checkpoint),
        device="cpu",
    )


def hooks() -> list[Any]:
    return [EMA(decay=0.8, evaluate=True), SWA(start=3, every=2)]


class Last(colossus.engine.Hook):
    """The last evaluation."""

    def on_eval_end(self, engine: Any, summary: Any) -> None:
        self.summary = summary


def runs(rank: int, root: Path) -> tuple[dict[str, float], dict[str, Tensor], list[str]]:
    """Body of a rank: a run, another that goes on in its midst, one under another plan, and one with a new hook.

    Returns:
        What the evaluation at the end of the first has measured, its EMA, and what was told of the new hook.
    """
    last, (ema, swa) = Last(), hooks()
    engine = colossus.initialize(config_of(root, "first", ZERO))
    fit(engine, [ema, swa, last])
    with ema.averaged(engine):
        average = full_state_dict(engine.model, engine.context)
        again = engine.evaluate()
    assert last.summary.more["ema.validation_loss"] == again.loss != last.summary.loss
    engine.close()
    half = root / "first" / name_of(HALF)

    again = Last()
    engine = colossus.initialize(config_of(root, "again", ZERO, resume=str(half)))
    fit(engine, [*hooks(), again])
    assert again.summary == last.summary
    engine.close()

    listener = Listener()
    logging.getLogger("colossus").addHandler(listener)
    engine = colossus.initialize(config_of(root, "other", dict(tensor=2)))
    engine.checkpoints.hooks = other = hooks()
    engine.checkpoints.load(half)
    engine.checkpoints.save().wait()
    assert not listener.told
    fit(engine, other)
    engine.close()

    engine = colossus.initialize(config_of(root, "without", dict(tensor=2)))
    engine.checkpoints.load(half)
    engine.checkpoints.save().wait()
    listener.told.clear()
    engine.checkpoints.hooks = hooks()
    engine.checkpoints.load(root / "without")
    for hook in engine.checkpoints.hooks:
        hook.on_train_start(engine)
    engine.close()
    return last.summary.numbers, average, listener.told


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, float], dict[str, Tensor], list[str]]:
    root = tmp_path_factory.mktemp("averages")
    (root / "text").mkdir()
    for number in range(9):
        (root / "text" / f"{number}.txt").write_text(f"{number} " + TEXT * (3 + number))
    return root, *run_ranks(2, runs, root, with_context=False)[0]


def tensors_in(folder: Path) -> dict[str, Tensor]:
    with CheckpointReader(folder) as reader:
        keys = [key for key in reader.manifest.tensors if key.startswith(("model/", "hook_state/"))]
        assert {key.split("/")[1] for key in keys if key.startswith("hook_state")} == {"EMA", "SWA"}
        return {key: reader.tensor(key) for key in keys}


def test_a_run_that_goes_on_has_the_averages_of_one_that_never_stopped(ran: Any) -> None:
    root, *_ = ran
    wanted = tensors_in(root / "first" / name_of(STEPS))
    found = tensors_in(root / "again" / name_of(STEPS))
    assert all(same_bits(found[key], value) for key, value in wanted.items())
    half = tensors_in(root / "first" / name_of(HALF))
    other = tensors_in(root / "other" / name_of(HALF))
    assert all(same_bits(other[key], value) for key, value in half.items())
    end = tensors_in(root / "other" / name_of(STEPS))
    for key, value in wanted.items():
        if "key.bias" not in key:
            torch.testing.assert_close(end[key], value, rtol=1e-8, atol=1e-10, msg=key)


def test_a_new_hook_says_where_it_begins(ran: Any) -> None:
    root, _, _, told = ran
    assert [line.partition(":")[0] for line in told] == ["EMA", "SWA"]
    assert told[0] == (
        f"EMA: {root / 'without' / name_of(HALF)} has no average of this hook: it begins with the weights after "
        f"step {HALF}"
    )


def test_commands_take_an_average(ran: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In the place of the weights, wherever weights are read."""
    root, numbers, average, _ = ran
    first = root / "first"
    found = read_state_dict(first, average="ema")
    assert found.keys() == average.keys()
    assert all(torch.equal(found[key], value) for key, value in average.items())
    assert not torch.equal(found["norm.weight"], read_state_dict(first)["norm.weight"])

    def output(*words: str) -> str:
        capsys.readouterr()
        assert main([*words]) == 0, capsys.readouterr().err
        return capsys.readouterr().out

    for name in ("ema", "swa"):
        whole = read_state_dict(first, average=name)
        for form in ("hf", "colossus"):
            folder = tmp_path / f"{form}-{name}"
            output("checkpoint", "convert", str(first), str(folder), "--to", form, "--weights", name)
            converted = read_state_dict(folder)
            assert all(torch.equal(converted[key], value) for key, value in whole.items())
    loss = output("evaluate", str(first), "--nproc", "1", "train.eval_batches=2", "--weights", "ema")
    assert float(loss.split()[1]) == pytest.approx(numbers["ema.validation_loss"], rel=1e-5)
    assert float(loss.split()[1]) != pytest.approx(numbers["validation_loss"], rel=1e-5)
    twin = PlainGPT(**{key: value for key, value in MODEL.items() if key != "type"}).double()
    twin.load_state_dict(read_state_dict(first, average="swa"))
    text = output("generate", str(first), "--weights", "swa", "--tokens", "1,2,3", "--max-tokens", "1", "--greedy")
    assert int(text.split(",")[-1]) == int(twin(torch.tensor([[1, 2, 3]]))[0, -1].argmax())
    assert "averages    EMA" not in output("checkpoint", "inspect", str(root / "without"))
    assert "averages    ema, swa" in output("checkpoint", "inspect", str(first))


def test_an_average_that_is_not_there(ran: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    root, *_ = ran
    with pytest.raises(
        CheckpointError, match=r"there is no average 'emma' of weights in the checkpoint; it has ema, swa"
    ):
        read_state_dict(root / "first", average="emma")
    for words in (
        ["evaluate"],
        ["generate", "--tokens", "1"],
        ["checkpoint", "convert", "--to", "hf", str(tmp_path / "x")],
    ):
        command = words[:2] if words[0] == "checkpoint" else words[:1]
        rest = words[len(command) :]
        assert main([*command, str(root / "without"), *rest, "--weights", "ema"]) == 2
        assert "it has none: they are kept by the hooks EMA and SWA" in capsys.readouterr().err
