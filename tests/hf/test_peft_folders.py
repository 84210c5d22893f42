"""Models with adapters of peft, trained under a plan and written: peft reads adapters, transformers what is merged."""

from __future__ import annotations

import json
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.adapters import ADAPTERS, LORA
from helpers.ranks import run_ranks
from safetensors.torch import load_file
from torch import Tensor, nn

import colossus
from colossus.checkpoint.errors import CheckpointError
from colossus.state.model_state_dict import full_state_dict

missing = [name for name in ("transformers", "peft") if find_spec(name) is None]
pytestmark = [
    pytest.mark.skipif(bool(missing), reason="scripts/test installs transformers and peft"),
    pytest.mark.long,
]
LLAMA: dict[str, Any] = dict(
    model_type="llama", hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4, vocab_size=12
)
TIED = LLAMA | dict(tie_word_embeddings=True)
GPT2: dict[str, Any] = dict(
    model_type="gpt2", n_embd=16, n_layer=2, n_head=4, vocab_size=12, n_positions=16, resid_pdrop=0.0, embd_pdrop=0.0,
    attn_pdrop=0.0,
)  # fmt: skip
#: sizes of a model, class and options of its adapters
CASES: dict[str, tuple[dict[str, Any], str, dict[str, Any]]] = {
    **{name: (LLAMA, *adapter) for name, adapter in ADAPTERS.items()},
    "LoRA": (LLAMA, "LoraConfig", LORA | dict(target_modules=["q_proj", "down_proj"])),
    "Conv1D": (GPT2, "LoraConfig", LORA | dict(target_modules=["c_attn", "c_proj"], fan_in_fan_out=True)),
    "tied words": (TIED, "LoraConfig", LORA | dict(target_modules=["q_proj", "embed_tokens"])),
    "a tied head of its own": (TIED, "LoraConfig", LORA | dict(target_modules=["q_proj"], modules_to_save=["lm_head"])),
    "biases": (
        LLAMA | dict(attention_bias=True), "LoraConfig", LORA | dict(target_modules=["q_proj"], bias="all"),
    ),
    "drawn": (LLAMA, "LoraConfig", LORA | dict(target_modules=["q_proj"], init_lora_weights="gaussian")),
}  # fmt: skip
PROMPTS = ("prompt tuning", "prefix tuning", "p-tuning")
IDS = torch.arange(20).view(4, 5) % 12


def write_base(name: str, folder: Path) -> Path:
    """Write what the adapters are put into, with what lies beside it."""
    import transformers

    torch.manual_seed(3)
    sizes = dict(CASES[name][0])
    config = transformers.AutoConfig.for_model(sizes.pop("model_type"), **sizes)
    base = transformers.AutoModelForCausalLM.from_config(config).double()
    base.generation_config = transformers.GenerationConfig(top_k=7, do_sample=True)
    base.save_pretrained(folder)
    (folder / "tokenizer.json").write_text('{"model": {}}')
    return folder


def adapted(name: str, base: Path) -> nn.Module:
    import peft
    import transformers

    torch.manual_seed(4)
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float64)
    _, kind, options = CASES[name]
    config = getattr(peft, kind)(task_type="CAUSAL_LM", **options)
    peft_model: nn.Module = peft.get_peft_model(model, config, autocast_adapter_dtype=False)
    return peft_model


def train_and_save(
    rank: int, bases: dict[str, Path], folder: Path, plan: dict[str, Any], **options: Any
) -> dict[str, tuple[float, dict[str, Tensor], dict[str, Tensor]]]:
    """Body of a rank: of each model the loss of the first step, the whole parameters before it and behind it."""
    states = {}
    for name, base in bases.items():
        config: dict[str, Any] = dict(
            train=dict(global_batch_size=4, precision="fp64", seed=1), optimizer=dict(type="SGD", lr=0.1), device="cpu"
        )
        engine = colossus.initialize(
            config | plan,
            model=colossus.parallelize(lambda name=name, base=base: adapted(name, base)),
            loss_fn=lambda outputs, batch: (outputs.logits.square().sum(), len(outputs.logits)),
        )
        start, drawn = full_state_dict(engine.model, engine.context), torch.get_rng_state()
        index, count = engine.context.index("data"), engine.context.size("data")
        loss = engine.train_step({"input_ids": IDS.chunk(count)[index]}).loss
        colossus.hf.save(engine, folder / name / "adapters", **options)
        if name not in PROMPTS:
            colossus.hf.save(engine, folder / name / "merged", merge=True, **options)
        assert torch.equal(torch.get_rng_state(), drawn), "the same random numbers follow on all ranks"
        states[name] = loss, start, full_state_dict(engine.model, engine.context)
        engine.close()
    return states


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        values: Tensor = model.eval()(input_ids=IDS).logits
    return values.double()


def check(folder: Path, names: list[str], world: int, plan: dict[str, Any]) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    bases = {name: write_base(name, folder / name / "base") for name in names}
    ranks = run_ranks(world, train_and_save, bases, folder, plan, with_context=False)
    for name, base in bases.items():
        twin = adapted(name, base).double()
        loss, start, trained = ranks[0][name]
        before, wanted = logits_of(twin, start), logits_of(twin, trained)
        assert loss == pytest.approx(float(before.square().sum()) / len(IDS), rel=1e-10), name
        assert (wanted - before).abs().max() > 1e-6, f"{name}: nothing was trained"
        written = folder / name / "adapters"
        read_base = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float64)
        back = PeftModel.from_pretrained(read_base, written, autocast_adapter_dtype=False)
        narrow = 1e-7 if name in PROMPTS else 1e-12  # peft has tokens in float32
        torch.testing.assert_close(logits(back), wanted, rtol=narrow, atol=narrow, msg=f"{name}, adapters")
        assert {"tokenizer.json", "generation_config.json", "adapter_config.json"} <= {
            file.name for file in written.iterdir()
        }
        theirs = folder / name / "theirs"
        twin.save_pretrained(theirs)  # type: ignore[operator]
        reference, mine = (
            load_file(theirs / "adapter_model.safetensors"),
            load_file(written / "adapter_model.safetensors"),
        )
        assert mine.keys() == reference.keys(), name
        for key, value in reference.items():
            torch.testing.assert_close(mine[key], value, rtol=1e-12, atol=1e-12, msg=f"{name}: {key}")
        configs = [json.loads((path / "adapter_config.json").read_text()) for path in (written, theirs)]
        for config in configs:  # sets, in any order
            config.update({key: sorted(value) for key, value in config.items() if isinstance(value, list)})
        assert configs[0] == configs[1], name
        if name not in PROMPTS:
            merged = AutoModelForCausalLM.from_pretrained(folder / name / "merged", dtype=torch.float64)
            torch.testing.assert_close(logits(merged), wanted, rtol=1e-10, atol=1e-12, msg=f"{name}, merged")
            assert merged.generation_config.top_k == 7
            assert json.loads((folder / name / "merged/config.json").read_text())["use_cache"] is True


def logits_of(model: nn.Module, state: dict[str, Tensor]) -> Tensor:
    """Return what plain torch gives with these values."""

    def is_turned(key: str) -> bool:
        path, _, leaf = key.rpartition(".")
        return leaf == "weight" and type(model.get_submodule(path)).__name__ == "Conv1D"

    model.load_state_dict({key: value.T if is_turned(key) else value for key, value in state.items()})
    return logits(model)


@pytest.mark.parametrize(
    ("names", "world", "plan"),
    [
        ([*CASES], 1, {}),
        ([*CASES], 2, dict(parallel=dict(data=2, zero=3))),
        ([*CASES], 2, dict(parallel=dict(tensor=2))),
        (["LoRA", "Conv1D", "DoRA"], 4, dict(parallel=dict(tensor=dict(mode="2d", size=4)))),
        (["LoRA", "Conv1D", "biases"], 2, dict(parallel=dict(pipeline=2), schedule=dict(microbatches=2))),
    ],
    ids=["one process", "zero 3", "1d", "2d", "pipeline"],
)
def test_adapters_are_read_by_peft_and_what_is_merged_by_transformers(
    tmp_path: Path, names: list[str], world: int, plan: dict[str, Any]
) -> None:
    check(tmp_path, names, world, plan)


def unfrozen(base: Path) -> nn.Module:
    model = adapted("LoRA", base)
    model.get_parameter("base_model.model.model.norm.weight").requires_grad_(True)
    return model


def added(base: Path) -> nn.Module:
    import peft
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(base)
    model.add_adapter(peft.LoraConfig(target_modules=["q_proj"]))
    return model  # type: ignore[no-any-return]


def refused(rank: int, base: Path, folder: Path, make: Any, merge: bool) -> str:
    config = dict(parallel=dict(tensor=2), train=dict(global_batch_size=4), optimizer=dict(type="SGD"), device="cpu")
    engine = colossus.initialize(
        config, model=colossus.parallelize(lambda: make(base)), loss_fn=lambda outputs, batch: (outputs.logits.sum(), 1)
    )
    with pytest.raises(CheckpointError) as caught:
        colossus.hf.save(engine, folder, merge=merge)
    engine.close()
    return str(caught.value)


@pytest.mark.parametrize(
    ("make", "merge", "words"),
    [
        (unfrozen, False, "norm.weight: trained, but no part of an adapter folder. Save the merged model"),
        (added, False, "LlamaForCausalLM has adapters from add_adapter"),
        (partial(adapted, "prompt tuning"), True, "cannot be merged into weights: leave merge out"),
    ],
)
def test_what_a_folder_cannot_hold_is_refused(tmp_path: Path, make: Any, merge: bool, words: str) -> None:
    base = write_base("LoRA", tmp_path / "base")
    for message in run_ranks(2, refused, base, tmp_path / "out", make, merge, with_context=False):
        assert words in message
    assert not (tmp_path / "out").exists()
