"""DeepSpeed's universal checkpoints, in the layout of ``ds_to_universal.py``, in our Llama under a plan."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.foreign_weights import PLANS, TOKENS, VOCABULARY, batch, train_from
from helpers.long import but
from helpers.ranks import run_ranks
from torch import Tensor, nn

from colossus.checkpoint import CheckpointError, read_state_dict

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, WIDE, LAYERS = 24, 4, 2, 6, 20, 2


class Llama(nn.Module):
    """A Llama by the names of Hugging Face, in plain torch."""

    def __init__(self) -> None:
        super().__init__()

        def linears(**sizes: tuple[int, int]) -> nn.ModuleDict:
            return nn.ModuleDict({name: nn.Linear(*size, bias=False) for name, size in sizes.items()})

        wide = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
        self.model = nn.ModuleDict(dict(embed_tokens=nn.Embedding(VOCABULARY, HIDDEN), norm=nn.RMSNorm(HIDDEN, 1e-5)))
        self.model.layers = nn.ModuleList(
            nn.ModuleDict(
                dict(
                    input_layernorm=nn.RMSNorm(HIDDEN, 1e-5),
                    self_attn=linears(
                        q_proj=(HIDDEN, wide[0]),
                        k_proj=(HIDDEN, wide[1]),
                        v_proj=(HIDDEN, wide[1]),
                        o_proj=(wide[0], HIDDEN),
                    ),
                    post_attention_layernorm=nn.RMSNorm(HIDDEN, 1e-5),
                    mlp=linears(gate_proj=(HIDDEN, WIDE), up_proj=(HIDDEN, WIDE), down_proj=(WIDE, HIDDEN)),
                )
            )
            for _ in range(LAYERS)
        )
        self.lm_head = nn.Linear(HIDDEN, VOCABULARY, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.model.embed_tokens(ids)
        for layer in self.model.layers:
            attention, mlp, normed = layer.self_attn, layer.mlp, layer.input_layernorm(x)
            q, k, v = (
                attention[f"{name}_proj"](normed).unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2) for name in "qkv"
            )
            out = F.scaled_dot_product_attention(rotated(q), rotated(k), v, is_causal=True, enable_gqa=True)
            x = x + attention.o_proj(out.transpose(1, 2).flatten(2))
            normed = layer.post_attention_layernorm(x)
            x = x + mlp.down_proj(F.silu(mlp.gate_proj(normed)) * mlp.up_proj(normed))
        return self.lm_head(self.model.norm(x))


def rotated(x: Tensor) -> Tensor:
    """Return x [.., tokens, head_dim], its halves turned by their position."""
    angles = torch.outer(
        torch.arange(x.shape[-2]).double(), 10000.0 ** -(torch.arange(0, HEAD_DIM, 2).double() / HEAD_DIM)
    )
    first, second = x.chunk(2, -1)
    return torch.cat(
        [first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()], dim=-1
    )


def llama() -> Llama:
    torch.manual_seed(3)
    model = Llama().double()
    for name, parameter in model.named_parameters():
        if "norm" in name:
            nn.init.normal_(parameter, 1.0, 0.2)
    return model


CONFIG = dict(
    model_type="llama", num_hidden_layers=LAYERS, hidden_size=HIDDEN, num_attention_heads=HEADS,
    num_key_value_heads=KV_HEADS, head_dim=HEAD_DIM, intermediate_size=WIDE, max_position_embeddings=TOKENS,
    vocab_size=VOCABULARY, rms_norm_eps=1e-5, rope_theta=10000.0, tie_word_embeddings=False,
)  # fmt: skip


def write(folder: Path, model: nn.Module, *, is_flat: bool) -> Path:
    """Write a universal checkpoint (float64, for the comparison), its ``config.json`` beside it.

    Args:
        is_flat: as ``merge_zero3_slices`` writes it; else as ``merge_tp_slices``.
    """
    for name, value in model.state_dict().items():
        directory = folder / "zero" / name
        directory.mkdir(parents=True)
        for state, tensor in (("fp32", value), ("exp_avg", value * 0), ("exp_avg_sq", value * 0)):
            more = {"vocab_tensor": True} if "embed" in name or "head" in name else {}
            content = tensor.flatten() if is_flat else {"cat_dim": 0, **more, "param": tensor}
            torch.save(content, directory / f"{state}.pt")
        torch.save(7, directory / "step.pt")
    torch.save({"param_groups": [], "zero_stage": 3}, folder / "zero" / "optimizer_state.pt")
    torch.save({"module": {}}, folder / "mp_rank_00_model_states.pt")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("universal")
    return {kind: write(root / kind, llama(), is_flat=kind == "flat") for kind in ("flat", "whole")}


MODEL = dict(
    type="Llama", num_layers=LAYERS, hidden_size=HIDDEN, num_heads=HEADS, num_kv_heads=KV_HEADS, seq_len=TOKENS,
    ffn_hidden_size=WIDE, vocab_size=VOCABULARY, rotary_base=10000.0, norm_eps=1e-5, tie_embeddings=False,
)  # fmt: skip


@pytest.mark.parametrize("plan", but(PLANS.keys() - {"1d"}, PLANS))
def test_a_universal_checkpoint_trains_on(plan: str, folders: dict[str, Path]) -> None:
    model = llama()
    logits = model(batch()["inputs"])
    loss = F.cross_entropy(logits.flatten(0, 1), batch()["labels"].flatten())
    loss.backward()
    last = model.model.layers[-1]
    world, parallel = PLANS[plan]
    for own_logits, own_loss, gradients in run_ranks(
        world, train_from, MODEL, parallel, str(folders["flat"]), with_context=False
    ):
        if own_logits is not None:
            assert (own_logits - logits).abs().max() < 1e-12
        assert abs(own_loss - loss.item()) < 1e-12
        for name, parameter in {
            "blocks.1.attention.qkv.key.weight": last.self_attn.k_proj.weight,
            "blocks.1.mlp.up.gate.weight": last.mlp.gate_proj.weight,
            "embedding.weight": model.model.embed_tokens.weight,
        }.items():
            assert (gradients[name] - parameter.grad).abs().max() < 1e-12, name


def test_whole_parameters_are_those_of_the_flat_ones(folders: dict[str, Path]) -> None:
    whole, flat = read_state_dict(folders["whole"]), read_state_dict(folders["flat"])
    assert whole.keys() == flat.keys()
    assert all(torch.equal(whole[name], flat[name]) for name in whole)
    assert torch.equal(whole["blocks.0.mlp.up.value.weight"], llama().model.layers[0].mlp.up_proj.weight)


class Harmful:
    def __reduce__(self) -> Any:
        return os.system, ("touch harmed",)


def test_what_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = write(tmp_path / "folder", llama(), is_flat=False)
    norm = folder / "zero" / "model.norm.weight" / "fp32.pt"
    content = norm.read_bytes()
    torch.save({"param": Harmful()}, norm)
    with pytest.raises(CheckpointError, match=r"fp32.pt: cannot be read: .* would run code of its own \(Unpickling"):
        read_state_dict(folder)
    assert not (tmp_path / "harmed").exists()
    torch.save({"cat_dim": 0}, norm)
    with pytest.raises(CheckpointError, match="has no parameter, but a NoneType"):
        read_state_dict(folder)
    torch.save({"param": torch.ones(HIDDEN - 1)}, norm)
    with pytest.raises(CheckpointError, match=r"model.norm.weight has shape \[23\], config.json says \[24\]"):
        read_state_dict(folder)
    norm.unlink()
    with pytest.raises(CheckpointError, match=r"1 missing: model\.norm\.weight"):
        read_state_dict(folder)
    norm.write_bytes(content)
    (folder / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"has no config\.json, which says what model this is"):
        read_state_dict(folder)
