"""A folder of torchtitan's Llama, as it saves it, in our Llama under a plan: logits, and a step of training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.foreign_weights import TOKENS, VOCABULARY, batch, train_from
from helpers.long import but
from helpers.ranks import run_ranks
from torch import Tensor, nn
from torch.distributed import checkpoint as dcp

from colossus.checkpoint import CheckpointError, read_state_dict

HIDDEN, HEADS, KV_HEADS, WIDE, LAYERS = 24, 4, 2, 20, 2
HEAD_DIM = HIDDEN // HEADS


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wq = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.wk, self.wv = (nn.Linear(HIDDEN, KV_HEADS * HEAD_DIM, bias=False) for _ in range(2))
        self.wo = nn.Linear(HIDDEN, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        samples, tokens, _ = x.shape
        q, k, v = (
            linear(x).view(samples, tokens, -1, HEAD_DIM).transpose(1, 2) for linear in (self.wq, self.wk, self.wv)
        )
        out = F.scaled_dot_product_attention(rotated(q), rotated(k), v, is_causal=True, enable_gqa=True)
        return self.wo(out.transpose(1, 2).flatten(2))


def rotated(x: Tensor) -> Tensor:
    """Return x [.., tokens, head_dim] with neighbouring features as complex numbers, turned by their position."""
    angles = torch.outer(
        torch.arange(x.shape[-2]).double(), 500000.0 ** -(torch.arange(0, HEAD_DIM, 2).double() / HEAD_DIM)
    )
    numbers = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(numbers * torch.polar(torch.ones_like(angles), angles)).flatten(-2)


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w3 = (nn.Linear(HIDDEN, WIDE, bias=False) for _ in range(2))
        self.w2 = nn.Linear(WIDE, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.feed_forward = Attention(), FeedForward()
        self.attention_norm, self.ffn_norm = (nn.RMSNorm(HIDDEN, eps=1e-5) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.ffn_norm(x))


class Titan(nn.Module):
    """A Llama with torchtitan's names and rotary positions, written from its layout."""

    def __init__(self) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCABULARY, HIDDEN)
        self.layers = nn.ModuleDict({str(number): Layer() for number in range(LAYERS)})
        self.norm = nn.RMSNorm(HIDDEN, eps=1e-5)
        self.output = nn.Linear(HIDDEN, VOCABULARY, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tok_embeddings(ids)
        for layer in self.layers.values():
            x = layer(x)
        return self.output(self.norm(x))


def titan() -> Titan:
    torch.manual_seed(3)
    model = Titan().double()
    for name, parameter in model.named_parameters():
        if "norm" in name:
            nn.init.normal_(parameter, 1.0, 0.2)
    return model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as torchtitan leaves it: with the optimizer, and without the number of heads."""
    path = tmp_path_factory.mktemp("titan")
    model = titan()
    state = {"model": model.state_dict(), "optimizer": {"state.output.weight.step": torch.ones(())}}
    dcp.save(state, checkpoint_id=path, no_dist=True)
    return path


PLANS: dict[str, tuple[int, dict[str, Any]]] = {
    "alone": (1, {}),
    "1d": (2, dict(tensor=2)),
    "2d": (4, dict(tensor=dict(mode="2d", size=4))),
    "3d": (8, dict(tensor=dict(mode="3d", size=8))),
    "zero 3": (2, dict(data=2, zero=3)),
    "pipeline": (2, dict(pipeline=2)),
}


MODEL = dict(
    type="Llama", num_layers=LAYERS, hidden_size=HIDDEN, num_heads=HEADS, num_kv_heads=KV_HEADS, seq_len=TOKENS,
    ffn_hidden_size=WIDE, vocab_size=VOCABULARY, rotary_base=500000.0, norm_eps=1e-5, tie_embeddings=False,
)  # fmt: skip


@pytest.mark.parametrize("plan", but(PLANS.keys() - {"1d"}, PLANS))
def test_a_folder_of_torchtitan_trains_on(plan: str, folder: Path) -> None:
    (folder / "params.json").write_text('{"n_heads": 4}')
    model = titan()
    logits = model(batch()["inputs"])
    loss = F.cross_entropy(logits.flatten(0, 1), batch()["labels"].flatten())
    loss.backward()
    queries = model.layers["0"].attention.wq.weight.grad.view(HEADS, HEAD_DIM // 2, 2, HIDDEN)
    world, parallel = PLANS[plan]
    for own_logits, own_loss, gradients in run_ranks(
        world, train_from, MODEL, parallel, str(folder), with_context=False
    ):
        if own_logits is not None:
            assert (own_logits - logits).abs().max() < 1e-12
        assert abs(own_loss - loss.item()) < 1e-12
        ours = gradients["blocks.0.attention.qkv.query.weight"].view(HEADS, 2, HEAD_DIM // 2, HIDDEN)
        assert (ours.transpose(1, 2) - queries).abs().max() < 1e-12
        assert (gradients["head.weight"] - model.output.weight.grad).abs().max() < 1e-12


def test_what_the_folder_does_not_say_is_asked_for(folder: Path) -> None:
    (folder / "params.json").unlink(missing_ok=True)
    with pytest.raises(CheckpointError, match=r"nothing says how many heads there are: echo '.\"n_heads\": 32.' > "):
        read_state_dict(folder)
    (folder / "params.json").write_text('{"n_heads": 5}')
    with pytest.raises(CheckpointError, match="n_heads = 5: the weights have 24 rows of queries"):
        read_state_dict(folder)
    (folder / "params.json").write_text('{"n_heads": "4"}')
    with pytest.raises(CheckpointError, match="of the model, in whole numbers"):
        read_state_dict(folder)
    (folder / "params.json").write_text('{"heads": 4}')
    with pytest.raises(CheckpointError, match="nothing says how many heads"):
        read_state_dict(folder)
