"""`model.lora`: what is trained under every plan, folders of peft in and out, merged models, refusals in words."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.hf_folders import GPT2, LLAMA, make_folder
from helpers.laws import assert_parity
from helpers.long import but
from helpers.plans import plans
from helpers.ranks import run_ranks
from helpers.training import config_of, run_plan
from helpers.transformers_models import in_float64
from torch import Tensor

import colossus
from colossus import layers
from colossus.checkpoint.errors import CheckpointError
from colossus.cli.main import main
from colossus.config import ConfigError, load_config
from colossus.models.gpt import GPT
from colossus.state.model_state_dict import full_state_dict

needs_peft = pytest.mark.skipif(
    any(find_spec(name) is None for name in ("transformers", "peft")), reason="scripts/test installs both"
)
IDS = torch.arange(24).view(2, 12) * 5 % 53
LORA: dict[str, Any] = dict(rank=2, alpha=6.0)
PLANS = plans("data2_1d", "2d", "zero3", "pipeline2", "1d_sharded")
VARIANTS: dict[str, dict[str, Any]] = {
    "all": dict(lora=LORA),
    "some": dict(
        lora=LORA | dict(targets=["query", "value", "down"]), mlp="swiglu", norm="rmsnorm", positions="rotary"
    ),
}


def config(parallel: dict[str, Any], **model: Any) -> dict[str, Any]:
    return config_of(parallel, 3, "fp64", model=model)


@pytest.mark.parametrize(
    ("plan", "variant"),
    [
        ("2d", "some"),
        ("data2_1d", "all"),
        *(
            pytest.param(plan, variant, marks=pytest.mark.long)
            for plan in PLANS
            for variant in VARIANTS
            if (plan, variant) not in (("2d", "some"), ("data2_1d", "all"))
        ),
    ],
)
def test_every_plan_follows_one_process(plan: str, variant: str) -> None:
    (reference,) = run_plan(1, config({}, **VARIANTS[variant]), 3)
    world, parallel = PLANS[plan]
    assert_parity(run_plan(world, config(parallel, **VARIANTS[variant]), 3), reference, "fp64")
    trained = {name for name in reference.end if not torch.equal(reference.end[name], reference.start[name])}
    assert trained == {name for name in reference.end if ".first." in name or ".second." in name}
    assert any("qkv.second.key" in name for name in trained) == (variant == "all")


# -- folders ----------------------------------------------------------------------------------------------------------

SIZES: dict[str, Any] = dict(vocab_size=53)
BASES: dict[str, dict[str, Any]] = {
    "llama": LLAMA | SIZES | dict(max_position_embeddings=12, num_hidden_layers=2, num_key_value_heads=2),
    "gpt2": GPT2 | SIZES | dict(n_positions=12, n_layer=2),
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", LORA | dict(targets=["query", "value", "out", "gate", "down"])),
    "gpt2": ("gpt2", LORA),
    "a part of c_attn": ("gpt2", LORA | dict(targets=["query", "value", "out"])),
}


def tuned(rank: int, base: Path, folder: Path, lora: dict[str, Any], parallel: dict[str, Any], steps: int) -> Any:
    """Tune a folder, write its adapters and the merged model, and return weights and logits of the tuned model."""
    model = dict(type="hf", path=str(base), lora=lora)
    engine = colossus.initialize(
        config_of(parallel, 3, "fp64", model=model, optimizer=dict(lr=0.05), lr_schedule=dict(type="constant"))
        | dict(data=[{"inputs": IDS[0] + row % 2, "labels": IDS[1]} for row in range(8)])
        | dict(checkpoint=dict(every=1, dir=str(folder / "run")))
    )
    for _ in range(steps):
        engine.train_step(next(engine.loader))
    if steps:
        colossus.hf.save(engine, folder / "adapters")
        colossus.hf.save(engine, folder / "merged", merge=True)
        engine.checkpoints.save(background=False).wait()
    weights = full_state_dict(engine.model, engine.context)
    logits = None
    if engine.context.world_size == 1:
        with torch.no_grad(), engine.context:
            logits = engine.model(IDS)
    engine.close()
    return weights, logits


def plain_model(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return in_float64(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64))


def logits_of(model: Any) -> Tensor:
    with torch.no_grad():
        logits: Tensor = model.eval()(IDS).logits
    return logits


@needs_peft
@pytest.mark.parametrize("case", but(("llama", "gpt2"), CASES))
def test_peft_and_transformers_read_what_is_written_and_it_comes_back(case: str, tmp_path: Path) -> None:
    import peft

    kind, lora = CASES[case]
    base = make_folder(tmp_path / "base", BASES[kind])
    before, _ = run_ranks(1, tuned, base, tmp_path, lora, {}, 0, with_context=False)[0]
    weights, _ = run_ranks(2, tuned, base, tmp_path, lora, dict(tensor=2), 3, with_context=False)[0]
    assert all(torch.equal(before[name], value) for name, value in weights.items() if ".base." in name)
    again, logits = run_ranks(
        1, tuned, base, tmp_path, lora | dict(path=str(tmp_path / "adapters")), {}, 0, with_context=False
    )[0]
    for name, value in weights.items():
        torch.testing.assert_close(again[name], value, rtol=0, atol=0, msg=name)

    plain = plain_model(base)
    assert (logits_of(plain) - logits).abs().max() > 1e-3
    adapted = peft.PeftModel.from_pretrained(plain, tmp_path / "adapters", autocast_adapter_dtype=False)
    torch.testing.assert_close(logits_of(adapted), logits, rtol=0, atol=1e-10)
    assert main(["checkpoint", "convert", str(tmp_path / "run"), str(tmp_path / "converted"), "--to", "hf"]) == 0
    for name in ("merged", "converted"):
        torch.testing.assert_close(logits_of(plain_model(tmp_path / name)), logits, rtol=0, atol=1e-10)


@needs_peft
@pytest.mark.parametrize("kind", BASES)
def test_adapters_that_peft_has_made_begin_a_run(kind: str, tmp_path: Path) -> None:
    import peft

    base = make_folder(tmp_path / "base", BASES[kind])
    model = plain_model(base)
    modules = {"llama": ["q_proj", "v_proj", "down_proj"], "gpt2": ["c_attn"]}[kind]
    targets = {"llama": ["query", "value", "down"], "gpt2": ["query", "key", "value"]}[kind]
    options = peft.LoraConfig(
        r=2, lora_alpha=6, target_modules=modules, init_lora_weights=False, fan_in_fan_out=kind == "gpt2"
    )
    theirs = peft.get_peft_model(model, options, autocast_adapter_dtype=False).eval()
    theirs.save_pretrained(tmp_path / "adapters")
    lora = LORA | dict(targets=targets, path=str(tmp_path / "adapters"))
    _, logits = run_ranks(1, tuned, base, tmp_path, lora, {}, 0, with_context=False)[0]
    torch.testing.assert_close(logits_of(theirs), logits, rtol=0, atol=1e-10)


def test_folders_that_do_not_fit_are_refused_in_words(tmp_path: Path) -> None:
    base = make_folder(tmp_path / "base", BASES["llama"])
    run_ranks(1, tuned, base, tmp_path, LORA, {}, 1, with_context=False)
    folder, path = tmp_path / "adapters", str(tmp_path / "adapters")
    content = json.loads((folder / "adapter_config.json").read_text())
    cases: list[tuple[dict[str, Any], dict[str, Any], str]] = [
        (dict(rank=4, alpha=6.0), {}, r"r = 2, lora_alpha = 6.0, but model.lora has rank = 4, alpha = 6: set those of"),
        (LORA, dict(use_dora=True), "use_dora = True: colossus has LoRA alone"),
        (LORA | dict(targets=["query"]), {}, "has adapters that model.lora.targets does not name: base_model.model"),
    ]

    def body(rank: int, lora: dict[str, Any]) -> str:
        with pytest.raises(CheckpointError) as caught:
            tuned(rank, base, tmp_path, lora | dict(path=path), {}, 0)
        return str(caught.value)

    for lora, changed, message in cases:
        (folder / "adapter_config.json").write_text(json.dumps(content | changed))
        (text,) = run_ranks(1, body, lora, with_context=False)
        assert message in text
        assert text.startswith("model.lora.path")


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        (dict(rank=0), "model.lora.rank"),
        (dict(rank=2, targets=["qkv"]), "model.lora.targets"),
        (dict(rank=2, target=["query"]), "model.lora.target: no such key; did you mean model.lora.targets?"),
        (dict(rank=2, alpha=-1.0), "model.lora.alpha"),
    ],
)
def test_options_are_checked_in_words(lora: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(config({}, lora=lora), nproc=1)
    assert message in str(caught.value)


def test_linears_that_a_model_has_not_are_named() -> None:
    def body(rank: int, parallel: dict[str, Any], **model: Any) -> str:
        with pytest.raises(ValueError, match=r"model.lora") as caught:
            colossus.initialize(config(parallel, **model))
        return str(caught.value)

    (message,) = run_ranks(1, lambda rank: body(rank, {}, lora=dict(targets=["gate", "up"])), with_context=False)
    assert message == "model.lora.targets: the blocks of this model have no linear gate"
    message, _ = run_ranks(2, lambda rank: body(rank, dict(tensor=2), num_kv_heads=1, lora={}), with_context=False)
    assert "blocks.0.attention.qkv is a ReplicatedKV, whose key and value heads several tensor ranks have" in message


def test_adapters_without_the_option_are_no_part_of_a_folder(tmp_path: Path) -> None:
    """Their scale is not known: they are neither left out nor merged in silence."""

    def body(rank: int) -> None:
        def made() -> Any:
            model = GPT(num_layers=1, hidden_size=8, num_heads=2, vocab_size=11, seq_len=6)
            block: Any = model.requires_grad_(False).blocks[0]
            block.mlp.up = layers.LoRALinear(block.mlp.up, 2, alpha=8)
            return model

        engine = colossus.initialize(dict(device="cpu"), model=made)
        with pytest.raises(CheckpointError, match=r"it has no blocks.0.mlp.up.bias, blocks.0.mlp.up.weight"):
            colossus.hf.save(engine, tmp_path / "folder")
        engine.close()

    run_ranks(1, body, with_context=False)
