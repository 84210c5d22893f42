"""Each layer's plain counterpart gives what the layer gives on the ranks of a plan; what has none is refused."""

from __future__ import annotations

import re
import threading
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
from colossus.checkpoint.state_dict import full_state_dict
from colossus.export import torch_modules
from colossus.layers.loss.cross_entropy import cross_entropy
from colossus.layers.rotary import Rotary
from colossus.layers.rotary_scaling import RotaryScaling
from colossus.models.gpt import GPT
from colossus.models.vit import ViT

BATCH, TOKENS, WIDTH = 4, 6, 16


class Everything(nn.Module):
    """Pictures and ids through every layer there is, masks and documents among their inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = layers.PatchEmbedding(3, WIDTH, (2, 4))
        self.places = layers.PositionEmbedding(16, WIDTH)
        self.words = layers.Embedding(11, WIDTH, padding_idx=0)
        self.block = layers.TransformerBlock(WIDTH, 4, 2, 24, rotary=True, mlp="swiglu", norm="rmsnorm", dropout=0.1)
        self.across = layers.TransformerBlock(WIDTH, 4, causal=False, bias=False, mlp="gelu_tanh")
        self.across.mlp = Squeezed()
        self.attention = layers.Attention(WIDTH, 2, rotary=True, rotary_scaling=dict(factor=2.0), causal=True)
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
        x = self.places(self.patches(inputs["images"]))[:, :TOKENS] + self.words(inputs["ids"]) * self.scale
        x = x + (self.bag(inputs["ids"]) + self.plain_bag(inputs["ids"])).unsqueeze(1) + self.plain_words(inputs["ids"])
        x = x + self.sampled(x, inputs["ids"])[0]
        x = self.block(x + self.shift, documents=inputs["documents"])
        x = self.across(x, mask=inputs["mask"])
        x = x + self.attention(x, mask=inputs["mask"], documents=inputs["documents"])
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
    assert not [each for each in model.modules() if "forward" in vars(each)]
    trains = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    rates = {name: module.p for name, module in model.named_modules() if isinstance(module, nn.Dropout)}
    return model(inputs()).detach(), wanted, trains, (rates, [type(each).__module__ for each in model.modules()])


@pytest.mark.parametrize("tensor", [1, 2])
def test_every_layer(tensor: int) -> None:
    for got, wanted, trains, (rates, modules) in run_ranks(tensor, of_everything, tensor, with_context=False):
        torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)
        assert {name for name, does in trains.items() if not does} == {"adapted.base.weight", "adapted.base.bias"}
        assert rates["dropout"] == 0.25
        assert rates["block.mlp_dropout"] == rates["block.attention_dropout"] == 0.1
        assert not [
            name for name in modules if name.startswith("colossus.") and name != "colossus.export.torch_modules"
        ]


# -- what is refused --------------------------------------------------------------------------------------------


class Doubled(layers.Linear):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x) * 2


class Shifted(layers.MLP):
    def _activation(self, up: Any) -> Tensor:
        return F.relu(up)


class Renamed(layers.Linear):
    """Computes what its base does."""


class OwnLayer(layers.Linear.__mro__[1]):  # type: ignore[misc]  # the base of the layers
    def forward(self, x: Tensor) -> Tensor:
        return x


class OwnGPT(GPT):
    def _logits(self, hidden: Any) -> Tensor:
        return super()._logits(hidden) / 2


class LossOnly(GPT):
    def loss(self, logits: Tensor, batch: Any) -> tuple[Tensor, Tensor]:
        return cross_entropy(logits, batch["labels"], z_loss=0.1)


class Measured(ViT):
    @property
    def eval_metrics(self) -> Any:
        return {}

    def make_norm(self) -> nn.Module:
        return layers.RMSNorm(self.options.hidden_size)


def replaced_forward() -> nn.Module:
    made = layers.Linear(4, 4)
    made.forward = lambda x: x  # type: ignore[method-assign]
    return made


def widened() -> nn.Module:
    made = layers.TransformerBlock(8, 2)
    made.adapter = nn.Linear(8, 8)
    return made


class WithLock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.lock = nn.Linear(2, 2), threading.Lock()


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "forward": (lambda: nn.Sequential(Doubled(4, 4)), r"0 \(Doubled\) overrides forward of colossus's Linear"),
    "activation": (lambda: Shifted(4, 8), r"the model \(Shifted\) overrides _activation of colossus's MLP"),
    "instance": (lambda: nn.Sequential(replaced_forward()), r"0 \(Linear\) overrides forward"),
    "own layer": (lambda: nn.Sequential(nn.Linear(2, 2), OwnLayer()), r"1 \(OwnLayer\) has no plain counterpart"),
    "more inside": (widened, r"\(TransformerBlock\) holds adapter"),
    "lock": (
        lambda: nn.Sequential(WithLock()),
        r"0 \(WithLock\) cannot be copied \(cannot pickle '_thread.lock' object",
    ),
    "own model": (lambda: OwnGPT(**SIZES), r"the model \(OwnGPT\) overrides _logits of colossus's Decoder"),
}


def convert(rank: int, make: Callable[[], nn.Module]) -> str | None:
    config = dict(train=dict(global_batch_size=2, precision="fp64"), device="cpu")
    engine = colossus.initialize(config, model=lambda: nn.Sequential(nn.Linear(1, 1), make())[1], loss_fn=loss)
    try:
        colossus.plain(engine)
    except ValueError as error:
        return str(error)
    finally:
        engine.close()
    return None


@pytest.mark.parametrize("case", REFUSED)
def test_what_has_no_counterpart_is_refused(case: str) -> None:
    make, words = REFUSED[case]
    (told,) = run_ranks(1, convert, make, with_context=False)
    assert told is not None
    assert re.search(words, told)


def of_own_classes(rank: int) -> list[str]:
    config = dict(train=dict(global_batch_size=2, precision="fp64"), device="cpu")
    kinds = []
    for make in (lambda: nn.Sequential(Renamed(4, 3)), lambda: LossOnly(**SIZES)):
        engine = colossus.initialize(config, model=make, loss_fn=loss)
        heard: list[Any] = []
        target = engine.model[0] if isinstance(engine.model, nn.Sequential) else engine.model.norm
        target.register_forward_hook(lambda *call, heard=heard: heard.append(call))
        model = colossus.plain(engine)
        inside = model[0] if isinstance(model, nn.Sequential) else model.norm
        model(torch.ones(2, 4, dtype=torch.float64) if isinstance(model, nn.Sequential) else torch.ones(2, 3).long())
        kinds.append(f"{type(model).__name__} {type(inside).__name__} {len(heard)}")
        engine.close()
    vit = dict(num_layers=1, hidden_size=8, num_heads=2, image_size=4, patch_size=2, num_classes=3)
    engine = colossus.initialize(config, model=lambda: Measured(**vit), loss_fn=loss)
    images = torch.randn(2, 3, 4, 4, dtype=torch.float64)
    assert torch.allclose(colossus.plain(engine).eval()(images), engine.model.eval()(images), rtol=1e-12)
    engine.close()
    return kinds


def test_subclasses_that_compute_the_same_and_hooks_of_users() -> None:
    assert run_ranks(1, of_own_classes, with_context=False) == [["Sequential Linear 1", "Decoder LayerNorm 1"]]


# -- what torch makes of it -------------------------------------------------------------------------------------


def of_llama(rank: int) -> nn.Module:
    config = dict(
        model=dict(type="Llama", **SIZES, num_kv_heads=2, rotary_scaling=dict(factor=8.0)),
        train=dict(global_batch_size=2),
        device="cpu",
    )
    engine = colossus.initialize(config)
    model = colossus.plain(engine)
    engine.close()
    return model


def test_torch_exports_and_traces_it() -> None:
    """With another number of samples and tokens than it was exported with."""
    (model,) = run_ranks(1, of_llama, with_context=False)
    model.eval()
    ids = torch.randint(0, SIZES["vocab_size"], (3, 7))
    batch, tokens = torch.export.Dim("batch", min=2, max=64), torch.export.Dim("tokens", min=2, max=64)
    exported = torch.export.export(model, (ids,), dynamic_shapes=((batch, tokens),))
    traced = torch.jit.trace(model, (ids,))
    other = torch.randint(0, SIZES["vocab_size"], (5, 11))
    torch.testing.assert_close(exported.module()(other), model(other), rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(traced(other), model(other), rtol=1e-6, atol=1e-7)


def test_linear_scaling_of_rotary_positions() -> None:
    scaling = RotaryScaling(factor=3.0, rope_type="linear")
    ours, plain = Rotary(8, 30.0, scaling), torch_modules.Rotary(8, 30.0, scaling.model_dump())
    query, key = torch.randn(2, 1, 2, 5, 8, dtype=torch.float64)
    turned = torch.stack(plain(query, key))
    assert torch.equal(turned, torch.stack((ours(query), ours(key))))
    assert not torch.equal(turned, torch.stack(torch_modules.Rotary(8, 30.0)(query, key)))
