"""Each layer in the model that `colossus.plain` gives computes what it does on the ranks of a plan, in any process."""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.ranks import run_ranks
from helpers.training import SIZES
from torch import Tensor, nn

import colossus
from colossus import layers
from colossus.convert.layer_table import ROWS
from colossus.models.gpt import GPT
from colossus.models.vit import ViT
from colossus.sparse.words_model import WordsLM
from colossus.state.model_state_dict import full_state_dict

BATCH, TOKENS, WIDTH = 4, 6, 16


class Everything(nn.Module):
    """Pictures and ids through every layer there is, masks and documents among their inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.sync, self.flat = layers.SyncBatchNorm(3), layers.BatchNorm2d(3, bias=False)
        self.deep = layers.BatchNorm3d(1)
        self.tokens = layers.BatchNorm1d(TOKENS, momentum=None)
        self.patches = layers.PatchEmbedding(3, WIDTH, (2, 4))
        self.places = layers.PositionEmbedding(16, WIDTH)
        self.words = layers.Embedding(11, WIDTH, padding_idx=0)
        self.block = layers.TransformerBlock(WIDTH, 4, 2, 24, rotary=True, mlp="swiglu", norm="rmsnorm", dropout=0.1)
        self.across = layers.TransformerBlock(WIDTH, 4, mask=layers.Mask.full(), bias=False, mlp="gelu_tanh")
        self.across.mlp = Squeezed()
        self.attention = layers.Attention(WIDTH, 2, rotary=True, rotary_scaling=dict(factor=2.0), sinks=True)
        self.latent = layers.LatentAttention(WIDTH, 2, kv_rank=8, nope_dim=4, rope_dim=4, value_dim=6)
        self.delta = layers.GatedDeltaNet(WIDTH, 4, 2, key_dim=4, value_dim=4)
        self.norm = layers.LayerNorm((TOKENS, WIDTH), elementwise_affine=False)
        self.rms = layers.RMSNorm(WIDTH, elementwise_affine=False)
        self.alone, self.fused = layers.Linear(WIDTH, 5), layers.Linear(WIDTH, {"a": 3, "b": 7}, bias=False)
        self.adapted = layers.LoRALinear(layers.Linear(WIDTH, WIDTH, split="column"), 4, alpha=2.0)
        self.back = layers.Linear(WIDTH, WIDTH, split="row")
        self.mlp, self.dropout = layers.MLP(WIDTH, 24), layers.Dropout(0.25)
        self.bag = layers.EmbeddingBag(11, WIDTH, mode="max", padding_idx=2, sparse=True)
        self.plain_bag, self.plain_words = nn.EmbeddingBag(11, WIDTH, sparse=True), nn.Embedding(11, WIDTH, sparse=True)
        self.sampled = layers.SampledSoftmax(WIDTH, 11, 3)
        self.head = layers.LMHead(WIDTH, 11, bias=True, tied_to=self.words)
        self.classes = layers.Classifier(WIDTH, 7)
        self.scale = nn.Parameter(torch.full((WIDTH,), 0.5))
        self.register_buffer("shift", torch.arange(WIDTH, dtype=torch.float64), persistent=False)

    def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        images = self.deep(self.flat(self.sync(inputs["images"])).unsqueeze(1)).squeeze(1)
        x = self.tokens(self.places(self.patches(images))[:, :TOKENS]) + self.words(inputs["ids"]) * self.scale
        x = x + (self.bag(inputs["ids"]) + self.plain_bag(inputs["ids"])).unsqueeze(1) + self.plain_words(inputs["ids"])
        x = x + self.sampled(x, inputs["ids"])[0]
        x = self.block(x + self.shift, documents=inputs["documents"])
        x = self.across(x, mask=inputs["mask"])
        x = x + self.attention(x, mask=inputs["mask"], documents=inputs["documents"])
        x = x + self.latent(x, mask=inputs["mask"], documents=inputs["documents"])
        x = x + self.delta(x, documents=inputs["documents"])
        x = self.rms(x) + self.norm(x) + self.dropout(self.mlp(x))
        x = x + self.back(F.gelu(self.adapted(x)))
        a, b = self.fused(x)
        classes, words = layers.to_whole(self.classes(x)), layers.to_whole(self.head(x))
        return torch.cat((self.alone(x), a, b, classes, words), -1)


class Squeezed(nn.Module):
    """A user's own module inside of a block of ours, with a layer of ours inside."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = layers.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.inner(x))


def loss(out: Tensor, batch: Any) -> tuple[Tensor, int]:
    return out.square().sum(), out.numel()


def inputs() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(7)
    return {
        "images": torch.randn(BATCH, 3, 8, 12, generator=generator, dtype=torch.float64),
        "ids": torch.randint(0, 11, (BATCH, TOKENS), generator=generator),
        "documents": torch.arange(TOKENS).ge(TOKENS // 2).long().expand(BATCH, -1).contiguous(),
        "mask": torch.ones(BATCH, 1, TOKENS, TOKENS, dtype=torch.bool).tril(1),
    }


def of_everything(rank: int, tensor: int) -> tuple[Tensor, Tensor, dict[str, tuple[Any, ...]], Any]:
    config = dict(
        parallel=dict(tensor=tensor),
        train=dict(
            global_batch_size=BATCH,
            precision="fp64",
            seed=3,
            activation_checkpoint=dict(type="full", modules=["across.mlp"]),
        ),
        optimizer=dict(type="SGD", lr=0.01),
        device="cpu",
    )
    engine = colossus.initialize(config, model=Everything, loss_fn=loss)
    engine.train_step({"inputs": inputs(), "labels": torch.zeros(BATCH)})
    engine.model.eval()
    with torch.no_grad(), engine.context:
        wanted = engine.model(inputs())
    model = colossus.plain(engine)
    state = full_state_dict(engine.model, engine.context)
    engine.close()
    assert {name: tuple(value.shape) for name, value in model.state_dict().items()} == {
        name: tuple(value.shape) for name, value in state.items()
    }
    assert "forward" in vars(engine.model.across.mlp)
    assert not [layer for layer in model.modules() if "forward" in vars(layer)]
    trains = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    rates = {name: module.p for name, module in model.named_modules() if isinstance(module, nn.Dropout)}
    return model(inputs()).detach(), wanted, trains, (rates, [type(layer) for layer in model.modules()])


@pytest.mark.parametrize("tensor", [1, 2])
def test_every_layer(tensor: int) -> None:
    for out, wanted, trains, (rates, kinds) in run_ranks(tensor, of_everything, tensor, with_context=False):
        torch.testing.assert_close(out, wanted, rtol=1e-12, atol=1e-12)
        assert {name for name, does in trains.items() if not does} == {"adapted.base.weight", "adapted.base.bias"}
        assert rates["dropout"] == 0.25
        assert rates["block.mlp_dropout"] == rates["block.attention_dropout"] == 0.1
        assert {row.torch for row in ROWS if row.torch is not None} <= set(kinds)
        assert not {row.ours for row in ROWS if row.torch is not None} & set(kinds)


# -- classes of users -------------------------------------------------------------------------------------------


class Doubled(layers.Linear):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x) * 2


class Shifted(layers.MLP):
    def _activation(self, up: Any) -> Tensor:
        return F.relu(up)


class Adapted(layers.LayerNorm):
    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.adapter, self.gain = nn.Linear(width, width), nn.Parameter(torch.full((width,), 2.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.adapter(super().forward(x)) * self.gain


class Halved(GPT):
    def _logits(self, hidden: Any) -> Tensor:
        return super()._logits(hidden) / 2


def of_own_classes(rank: int) -> list[tuple[nn.Module, Tensor, Tensor]]:
    """The plain modules, what goes in, and what the engine's gives on it."""
    cases: list[tuple[nn.Module, Tensor, Tensor]] = []
    config = dict(parallel=dict(tensor=2), train=dict(global_batch_size=2, precision="fp64"), device="cpu")
    words = torch.arange(6).view(2, 3)
    numbers = torch.arange(8, dtype=torch.float64).view(2, 4).sin()
    chain = lambda: nn.Sequential(Doubled(4, 4), Shifted(4, 8), Adapted(4))  # noqa: E731
    images = torch.linspace(-1, 1, 96, dtype=torch.float64).view(2, 3, 4, 4)
    vit: dict[str, Any] = dict(num_layers=1, hidden_size=8, num_heads=2, image_size=4, patch_size=2, num_classes=4)
    for make, x in (
        (chain, numbers),
        (lambda: Halved(**SIZES, attention_dropout=0.2), words),
        (lambda: ViT(**vit), images),
        (lambda: WordsLM(**SIZES, trunk="gpt", num_samples=3), words),
    ):
        engine = colossus.initialize(config, model=make, loss_fn=loss)
        model = colossus.plain(engine).eval()
        engine.model.eval()
        with torch.no_grad(), engine.context:
            wanted = layers.to_whole(engine.model(x))
        engine.close()
        cases.append((model, x, wanted))
    return cases


def test_classes_of_users_stay_and_need_no_context() -> None:
    """Copied, pickled (a rank has sent it here) and trained in a process that has no group and no context."""
    names = ("Sequential", "Halved", "ViT", "WordsLM")
    for (model, x, wanted), name in zip(run_ranks(2, of_own_classes, with_context=False)[0], names, strict=True):
        assert type(model).__name__ == name
        copies = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
        for net in (model, *copies):
            torch.testing.assert_close(net(x).detach(), wanted, rtol=1e-12, atol=1e-12)
        copies[0].train()
        optimizer = torch.optim.AdamW(copies[0].parameters(), lr=0.1)
        before = [net.detach().clone() for net in copies[0].parameters()]
        copies[0](x).square().sum().backward()
        optimizer.step()
        after = [not torch.equal(old, new) for old, new in zip(before, copies[0].parameters(), strict=True)]
        assert all(after) or name == "WordsLM", "all but the head of a WordsLM, which is in its loss, are learned"
        assert torch.equal(model(x), copies[1](x)), "a copy has weights of its own"


# -- what is refused --------------------------------------------------------------------------------------------


class OwnLayer(layers.Linear.__mro__[1]):  # type: ignore[misc]  # the base of the layers
    def __init__(self) -> None:
        super().__init__()
        self.inner = layers.Linear(2, 2)
        self.weight = self.inner.weight

    def forward(self, x: Tensor) -> Tensor:
        return x


class Fused(layers.Linear):
    def forward(self, x: Tensor) -> Any:
        return torch.cat(super().forward(x), -1)


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "own layer": (OwnLayer, r"1 \(OwnLayer\) makes weight itself, and has no row"),
    "fused": (lambda: Fused(4, dict(a=2, b=2)), r"1 \(Fused\) is a fused Linear with a forward or parts of its own"),
}


def refused(rank: int) -> dict[str, str]:
    config = dict(train=dict(global_batch_size=2, precision="fp64"), device="cpu")
    messages = {}
    for name, (make, _) in REFUSED.items():
        engine = colossus.initialize(
            config, model=lambda make=make: nn.Sequential(nn.Linear(1, 1), make()), loss_fn=loss
        )
        with pytest.raises(ValueError) as error:  # noqa: PT011
            colossus.plain(engine)
        messages[name] = str(error.value)
        engine.close()
    return messages


def test_what_cannot_be_made_is_refused() -> None:
    (messages,) = run_ranks(1, refused, with_context=False)
    for name, (_, words) in REFUSED.items():
        assert re.search(words, messages[name]), messages[name]
