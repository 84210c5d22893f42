"""Models in a config that know nothing of colossus: of transformers' own code, and of plain torch."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from helpers.plans import plans
from helpers.ranks import run_ranks
from torch import Tensor, nn

import colossus
from colossus.arithmetic import byte_count
from colossus.checkpoint.errors import CheckpointError
from colossus.cli.main import main
from colossus.config import ConfigError, load_config
from colossus.state.model_state_dict import full_state_dict

SIZES: dict[str, dict[str, Any]] = {
    "gpt2": dict(n_embd=16, n_layer=2, n_head=4, n_positions=8, vocab_size=53, resid_pdrop=0.0, embd_pdrop=0.0,
                 attn_pdrop=0.0, bos_token_id=1, eos_token_id=2),
    "qwen3": dict(hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4, head_dim=4,
                  num_key_value_heads=2, vocab_size=53, max_position_embeddings=8, tie_word_embeddings=True),
}  # fmt: skip
PLANS = plans("1d", "2d", "zero2_pipeline2")
STEPS = 2


def settings(model: dict[str, Any], plan: dict[str, Any]) -> dict[str, Any]:
    train = dict(global_batch_size=4, precision="fp64", seed=3)
    return dict(model=model, parallel=plan, optimizer=dict(type="SGD", lr=0.1), train=train, device="cpu")


def batch_of(step: int) -> dict[str, Tensor]:
    ids = torch.randint(0, 53, (4, 9), generator=torch.Generator().manual_seed(step))
    return {"inputs": ids[:, :-1], "labels": ids[:, 1:]}


def train(rank: int, model: dict[str, Any], plan: dict[str, Any], out: Path | None) -> list[float]:
    engine = colossus.initialize(settings(model, plan))
    losses = [engine.train_step(batch_of(step)).loss for step in range(STEPS)]
    if out is not None:
        colossus.hf.save(engine, out)
    engine.close()
    return losses


@pytest.mark.parametrize("kind", SIZES)
@pytest.mark.rest("gpt2")
def test_a_folder_trains_by_transformers_own_code_and_is_written_again(kind: str, tmp_path: Path) -> None:
    """Losses and weights after the steps are those of the model in plain torch, under its own names."""
    transformers.logging.set_verbosity_error()
    torch.manual_seed(1)
    theirs = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(kind, **SIZES[kind]))
    theirs = theirs.double()
    theirs.save_pretrained(tmp_path / "in")
    losses_by_plan = {}
    for name, (world, plan) in [*PLANS.items()][: 1 if kind == "qwen3" else None]:
        model = dict(type="hf", path=str(tmp_path / "in"), native=True)
        losses_by_plan[name] = run_ranks(world, train, model, plan, tmp_path / name, with_context=False)[0]
    optimizer = torch.optim.SGD(theirs.parameters(), lr=0.1)
    losses = []
    for step in range(STEPS):
        batch = batch_of(step)
        logits = theirs(batch["inputs"]).logits
        loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    for name in losses_by_plan:
        assert losses_by_plan[name] == pytest.approx(losses, abs=1e-9), name
        back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype=torch.float64)
        for (key, mine), wanted in zip(back.state_dict().items(), theirs.state_dict().values(), strict=True):
            torch.testing.assert_close(mine, wanted, rtol=1e-9, atol=1e-9, msg=lambda m, key=key: f"{key}: {m}")


def test_a_folder_of_other_tensors_is_refused(tmp_path: Path) -> None:
    config = transformers.AutoConfig.for_model("qwen3", **SIZES["qwen3"])
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "in")

    def body(rank: int, **more: Any) -> str:
        model = dict(type="hf", path=str(tmp_path / "in"), native=True, **more)
        with pytest.raises((CheckpointError, ValueError)) as caught:
            colossus.initialize(settings(model, {}))
        return str(caught.value)

    def bodies(rank: int) -> list[str]:
        more: list[dict[str, Any]] = [
            dict(num_hidden_layers=3), dict(tie_word_embeddings=False), dict(intermediate_size=28),
            dict(architecture="Nothing"),
        ]  # fmt: skip
        return [body(rank, **options) for options in more]

    layers, head, sizes, classes = run_ranks(1, bodies, with_context=False)[0]
    assert "transformers refuses this config of a 'qwen3': " in layers
    assert "is not the Qwen3ForCausalLM of its config: 1 missing: lm_head.weight" in head
    assert "6 of another shape: model.layers.0.mlp.gate_proj.weight [24, 16] (here [28, 16])" in sizes
    assert "has no class 'Nothing'" in classes


def test_what_names_no_model_is_refused() -> None:
    for options, words in (
        (dict(native=True), "config=dict(model_type="),
        (dict(native=True, path="/nowhere"), "is no model folder of Hugging Face"),
    ):
        with pytest.raises(ConfigError, match=words.replace("(", r"\(")):
            load_config(dict(model=dict(type="hf", **options), data=dict(type="PythonStdlib")))


class Half(nn.Module):
    """A part of a model of plain torch, made by `make_net`."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, width), nn.Linear(width, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))

    def loss(self, outputs: Tensor, batch: Tensor) -> tuple[Tensor, Tensor]:
        return outputs.square().sum(), torch.tensor(len(outputs))


def torch_body(rank: int) -> tuple[float, list[str]]:
    model = dict(type="torch", factory=Half, kwargs=dict(width=8), example=torch.zeros(2, 6))
    engine = colossus.initialize(settings(model, dict(tensor=2)))
    loss = engine.train_step(torch.arange(24.0).view(4, 6) / 10).loss
    state = full_state_dict(engine.model, engine.context)
    plain = Half(8).double()
    plain.load_state_dict(state)
    engine.close()
    return loss, [type(module).__name__ for module in engine.model.children()]


def test_a_model_of_plain_torch_in_a_config() -> None:
    loss, kinds = run_ranks(2, torch_body, with_context=False)[0]
    assert kinds == ["Linear", "Linear"]
    assert 0 < loss < 100

    def missing(rank: int) -> str:
        with pytest.raises(ValueError, match="factory = 'nowhere:net'") as caught:
            colossus.initialize(settings(dict(type="torch", factory="nowhere:net"), {}))
        return str(caught.value)

    assert "there is no module 'nowhere'" in run_ranks(1, missing, with_context=False)[0]


def test_show_layers_says_what_became_of_modules(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = dict(type="hf", config=dict(model_type="gpt2", **SIZES["gpt2"]))
    file = tmp_path / "config.py"
    file.write_text(f"model = {model!r}\ndata = dict(type='PythonStdlib', seq_len=8)\n")
    assert main(["show", str(file), "--layers", "parallel.tensor=2"]) == 0
    out = capsys.readouterr().out
    table = out.partition("sends:")[0].splitlines()
    rows = {line.split()[0]: line.split()[1:] for line in table if line.startswith("transformer.h.*.")}
    assert rows["transformer.h.*.mlp.c_fc"][:2] == ["Conv1D", "Linear(column)"]
    assert rows["transformer.h.*.mlp.c_proj"][:2] == ["Conv1D", "Linear(row)"]
    assert "transformer.h.*.attn.c_attn  is alone: " in out
    saved = next(line for line in out.splitlines() if line.startswith("saved"))
    assert float(saved.split()[1]) > 0


def test_show_layers_lists_what_is_whole_on_each_rank(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What torch's attention holds, what a rule leaves, and norms; the smallest together."""
    file = tmp_path / "config.py"
    file.write_text("""
import torch
from torch import nn

def _net():
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(12, 2, 24, batch_first=True), 2)

model = dict(type="torch", factory=_net, example=torch.zeros(2, 4, 12), rules={"layers.1.linear1": "torch"})
data = dict(type="PythonStdlib", seq_len=8)
""")
    assert main(["show", str(file), "--layers", "parallel.tensor=2"]) == 0
    out = capsys.readouterr().out
    table = out.partition("whole on each rank")[2].splitlines()[1:]
    rows = [re.split(" {2,}", line) for line in table]
    attention, layer = 3 * (12 * 12 + 12) * 4, (12 * 12 + 12) * 4
    assert rows[:3] == [
        ["layers.*.self_attn", "MultiheadAttention", byte_count(2 * attention), "it computes with its weights itself"],
        ["layers.*.self_attn.out_proj", "NonDynamicallyQuantizableLinear", byte_count(2 * layer),
         "nn.MultiheadAttention reads its weight itself"],
        ["layers.1.linear1", "Linear", byte_count((24 * 12 + 24) * 4), "a rule leaves it"],
    ]  # fmt: skip
    assert rows[3][3] == "norms are whole"
    total = 2 * (attention + layer + (2 * 24 * 12 + 24 + 12) * 4 + 4 * 12 * 4)
    assert f" of {byte_count(total)} of weights, " in out
