"""A frozen model beside the one that trains: its weights, its memory, resumes, adapters, folders, refusals."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.examples import example
from helpers.ranks import run_ranks
from helpers.training import batch_of

import colossus
from colossus.checkpoint.errors import CheckpointError
from colossus.checkpoint.folder import locate
from colossus.config import ConfigError, load_config
from colossus.data.make_loaders import loaders_of
from colossus.inference.config import find_source
from colossus.inference.model import load_model
from colossus.launch.resume import choose
from colossus.layers import LoRALinear
from colossus.models.gpt import GPT
from colossus.state.model_state_dict import full_state_dict, load_full_state_dict

SIZES: dict[str, Any] = dict(num_layers=2, hidden_size=24, num_heads=4, vocab_size=53, seq_len=12)
DPO: dict[str, Any] = dict(objective=dict(type="dpo", beta=0.3), reference=dict())


def config_of(model: dict[str, Any], folder: Path, **more: Any) -> dict[str, Any]:
    train = dict(steps=4, global_batch_size=8, precision="fp64", seed=3, **more.pop("train", {}))
    checkpoint = dict(dir=str(folder), **more.pop("checkpoint", {}))
    return dict(
        model={**SIZES, "type": "GPT", **model}, optimizer=dict(lr=1e-2), train=train, checkpoint=checkpoint,
        device="cpu", **more,
    )  # fmt: skip


def rows_of(engine: Any, step: int) -> dict[str, torch.Tensor]:
    index, count = engine.context.index("data"), engine.context.size("data")
    return {
        key: value[index * 8 // count : (index + 1) * 8 // count] for key, value in batch_of(step, SIZES, 8).items()
    }


def trained(config: dict[str, Any], steps: range, *, save: bool = False, resume: bool = False) -> dict[str, Any]:
    """Losses of some steps; the reference's weights before them and after."""
    engine = colossus.initialize(config)
    if resume:
        engine.checkpoints.resume()
    other = engine.model.reference
    before = None if other is None else full_state_dict(other, engine.context)
    losses = [engine.train_step(rows_of(engine, step)).loss for step in steps]
    after = None if other is None else full_state_dict(other, engine.context)
    own = full_state_dict(engine.model, engine.context)
    if save:
        engine.checkpoints.save(background=False).wait()
    engine.close()
    return dict(losses=losses, before=before, after=after, own=own)


PLANS: dict[str, tuple[int, dict[str, Any]]] = {
    "alone": (1, {}),
    "pipeline": (2, dict(parallel=dict(pipeline=2), schedule=dict(microbatches=2))),
    "zero 3": (2, dict(parallel=dict(data=2, zero=3))),
}


@pytest.mark.parametrize("plan", PLANS)
def test_the_reference_has_the_weights_with_which_the_model_began_also_after_a_resume(
    plan: str, tmp_path: Path
) -> None:
    first = trained(config_of({}, tmp_path / "sft"), range(3), save=True)
    ranks, more = PLANS[plan]

    def body(rank: int) -> list[dict[str, Any]]:
        begins = dict(weights=str(tmp_path / "sft"))
        whole = trained(config_of(DPO, tmp_path / f"whole{plan}", checkpoint=begins, **more), range(4))
        half = config_of(DPO, tmp_path / f"half{plan}", checkpoint={**begins, "resume": "auto"}, **more)
        return [whole, trained(half, range(2), save=True), trained(half, range(2, 4), resume=True)]

    for whole, half, rest in run_ranks(ranks, body, with_context=False):
        assert whole["losses"] == half["losses"] + rest["losses"]
        assert whole["losses"][0] == pytest.approx(math.log(2), rel=1e-12)  # both are the same
        for run in (whole, half, rest):
            for state in (run["before"], run["after"]):
                assert state.keys() == first["own"].keys()
                assert all(torch.equal(state[name], value) for name, value in first["own"].items())
        assert whole["own"].keys() == first["own"].keys()
        assert not torch.equal(whole["own"]["blocks.0.mlp.up.weight"], first["own"]["blocks.0.mlp.up.weight"])


@pytest.mark.parametrize("key", ["reference", "checkpoint"])
def test_newer_weights_under_the_path_of_a_reference_are_refused(key: str, tmp_path: Path) -> None:
    def tuned(path: str | None) -> dict[str, Any]:
        reference = dict(weights=path) if key == "reference" else {}
        begin = dict(weights=path) if key == "checkpoint" else {}
        return config_of({**DPO, "reference": reference}, tmp_path / "dpo", checkpoint={**begin, "resume": "auto"})

    base = str(tmp_path / "sft")
    trained(config_of({}, tmp_path / "sft"), range(1), save=True)
    first = str(locate(tmp_path / "sft"))
    begun = trained(tuned(base), range(1), save=True)
    trained(config_of({}, tmp_path / "sft", checkpoint=dict(resume="auto")), range(1, 2), save=True, resume=True)
    with pytest.raises(CheckpointError, match="has newer ones"):
        trained(tuned(base), range(1, 2), resume=True)
    resumed = trained(tuned(first), range(1, 2), resume=True)
    assert all(torch.equal(resumed["before"][name], value) for name, value in begun["before"].items())


def test_a_checkpoint_is_that_of_the_model_alone(tmp_path: Path) -> None:
    """It generates, and goes to a folder of Hugging Face."""
    config = config_of({**DPO, "mlp": "gelu_tanh", "loss_chunk": 8}, tmp_path / "dpo")
    engine = colossus.initialize(config)
    engine.train_step(rows_of(engine, 0))
    path = engine.checkpoints.save(background=False).wait().path
    colossus.hf.save(engine, tmp_path / "hf")
    ids = batch_of(0, SIZES, 2)["inputs"]
    engine.model.eval()
    with torch.no_grad():
        logits = engine.model(ids)
    engine.close()
    for folder in (path, tmp_path / "hf"):
        model = load_model(find_source(str(folder)), overrides=["train.precision=fp64"])
        assert model.module.reference is None
        with torch.no_grad():
            torch.testing.assert_close(model.module(ids).double(), logits, rtol=1e-5, atol=1e-5)
        model.context.close()


def test_under_zero_3_each_block_of_both_is_a_unit_of_its_own(tmp_path: Path) -> None:
    def body(rank: int) -> list[int]:
        engine = colossus.initialize(config_of(DPO, tmp_path, parallel=dict(data=2, zero=3)))
        blocks = [len(block.params) for block in engine.store.blocks]
        transient = [block.is_transient for block in engine.store.blocks]
        engine.close()
        assert transient == [False, True, True, True, True]
        return blocks

    for blocks in run_ranks(2, body, with_context=False):
        assert blocks[1:] == [blocks[1]] * 4


@pytest.mark.parametrize("plan", ["1d", "pipeline"])
def test_a_model_without_its_adapters_is_the_reference(plan: str, tmp_path: Path) -> None:
    """The same as with a copy of the frozen weights, which needs memory."""
    more = dict(parallel=dict(tensor=2)) if plan == "1d" else PLANS["pipeline"][1]

    def adapted(reference: dict[str, Any]) -> GPT:
        model = GPT(**SIZES, objective=DPO["objective"], reference=reference).requires_grad_(False)
        for block in model.blocks:
            block.attention.qkv = LoRALinear(block.attention.qkv, 4)
            block.mlp.down = LoRALinear(block.mlp.down, 4)
        return model

    def body(rank: int) -> list[list[float]]:
        losses = []
        for reference in (dict(adapters_off=True), dict()):
            config = {key: value for key, value in config_of({}, tmp_path, **more).items() if key != "model"}
            engine = colossus.initialize(config, model=lambda reference=reference: adapted(reference))
            if engine.model.reference is not None:
                frozen = full_state_dict(engine.model, engine.context)
                names = {name.replace(".base.", "."): value for name, value in frozen.items() if ".first." not in name}
                own = {name: value for name, value in names.items() if ".second." not in name}
                load_full_state_dict(engine.model.reference, own, engine.context)
            losses.append([engine.train_step(rows_of(engine, step)).loss for step in range(3)])
            engine.close()
        return losses

    for shared, copied in run_ranks(2, body, with_context=False):
        assert shared == pytest.approx(copied, rel=1e-12)
        assert shared[2] < shared[0]


def test_dropout_is_not_in_the_reference(tmp_path: Path) -> None:
    engine = colossus.initialize(config_of({**DPO, "dropout": 0.5}, tmp_path))
    engine.model.eval()  # the step sets the model back
    engine.train_step(rows_of(engine, 0))
    assert engine.model.training
    assert not any(module.training for module in engine.model.reference.modules())
    engine.close()


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (dict(reference=dict()), "no objective takes it"),
        (dict(objective=dict(type="distillation")), "needs a reference"),
        (dict(DPO, mtp_weight=0.3), "mtp_weight"),
        (dict(DPO, z_loss=1e-4), "z_loss is of the loss of next tokens"),
        (dict(objective=dict(type="grpo"), reference=dict()), "its kl_weight is 0"),
        (dict(objective=dict(type="distillation", reverse=True, top_k=3), reference=dict()), "the reverse is infinite"),
        (dict(DPO, reference=dict(model=dict(num_layer=1))), "did you mean reference.model.num_layers"),
        (dict(objective=dict(type="dop")), "distillation"),
        (dict(DPO, reference=dict(parallel=dict(data=2))), "runs under the plan of the model"),
        (dict(DPO, reference=dict(adapters_off=True), dropout=0.1), "dropout"),
        (dict(DPO, type="WordsLM"), "a sampled softmax has its own loss"),
        (dict(type="WordsLM", loss_chunk=8), "few logits"),
        (dict(DPO, reference=dict(adapters_off=True, weights="x")), "already"),
    ],
)
def test_what_does_not_go_together_is_refused_before_a_start(model: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=words):
        load_config(config_of(model, tmp_path))


def rows_of_pairs() -> list[dict[str, torch.Tensor]]:
    return [batch_of(0, SIZES, 2)] * 8


def test_pairs_that_would_be_parted_are_refused(tmp_path: Path) -> None:
    texts = config_of(DPO, tmp_path, data=dict(type="PythonStdlib"))
    with pytest.raises(ValueError, match="rows of PythonStdlib are single texts"):
        colossus.initialize(texts)
    own = load_config(config_of(DPO, tmp_path, data=dict(type=f"{__name__}:rows_of_pairs")))
    loaders_of(own, own.data, data_rank=0, data_size=1, device="cpu").close()
    parted = config_of(DPO, tmp_path, schedule=dict(microbatches=2), train=dict(samples_interact=True))
    engine = colossus.initialize(parted)
    with pytest.raises(ValueError, match="parts the two texts of a pair"):
        engine.train_step(rows_of(engine, 0))
    engine.close()


def test_a_missing_reference_is_told(tmp_path: Path) -> None:
    engine = colossus.initialize(config_of(dict(objective=DPO["objective"]), tmp_path))
    with pytest.raises(ValueError, match="reference_log_probs"):
        engine.train_step(rows_of(engine, 0))
    engine.close()
    with pytest.raises(ValueError, match="a vocabulary of 60"):
        colossus.initialize(config_of(dict(DPO, reference=dict(model=dict(vocab_size=60))), tmp_path))
    with pytest.raises(ValueError, match="has learnt 8 positions"):
        colossus.initialize(config_of(dict(DPO, reference=dict(model=dict(seq_len=8))), tmp_path))
    experts = dict(model=dict(experts=dict(num=2, top_k=1)))
    with pytest.raises(ValueError, match="a model with experts cannot be one"):
        colossus.initialize(config_of(dict(DPO, type="Llama", reference=experts), tmp_path))
    with pytest.raises(ValueError, match="leave one of them out"):
        colossus.initialize(config_of(DPO, tmp_path), loss_fn=lambda outputs, batch: (outputs.own.sum(), 1))
    engine = colossus.initialize(config_of(dict(DPO, reference=dict(adapters_off=True)), tmp_path))
    with pytest.raises(ValueError, match=r"has no colossus[.]layers[.]LoRALinear"):
        engine.train_step(rows_of(engine, 0))
    engine.close()


def test_a_launch_looks_at_the_weights_of_a_reference(tmp_path: Path) -> None:
    trained(config_of({}, tmp_path / "sft"), range(1), save=True)
    for reference, words in (
        (dict(weights=str(tmp_path / "nope")), "there is no such folder"),
        (dict(weights=str(tmp_path / "sft"), model=dict(hidden_size=48)), "nothing in the checkpoint fits this model"),
    ):
        config = load_config(config_of({**DPO, "mlp": "gelu_tanh", "reference": reference}, tmp_path / "dpo"))
        with pytest.raises(ConfigError, match=words):
            choose(config).check()


def test_log_probabilities_in_the_data_are_as_good_as_the_reference(tmp_path: Path) -> None:
    losses = []
    for reference in (dict(), None):
        engine = colossus.initialize(config_of(dict(objective=DPO["objective"], reference=reference), tmp_path))
        model = example("finetune").GPT(**SIZES).double()
        load_full_state_dict(model, full_state_dict(engine.model, engine.context), engine.context)
        mine = []
        for step in range(2):
            batch = rows_of(engine, step)
            if reference is None:
                log_probs = model(batch["inputs"]).log_softmax(-1)
                label_log_probs = log_probs.gather(-1, batch["labels"].clamp(min=0)[..., None])[..., 0]
                batch["reference_log_probs"] = label_log_probs.detach()
            mine.append(engine.train_step(batch).loss)
        losses.append(mine)
        engine.close()
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)
