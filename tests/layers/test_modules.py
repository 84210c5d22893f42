"""Hooks, overridden forwards, replaced children and LoRA inside of our blocks, against plain torch, in every mode."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.long import but
from helpers.modes import BATCH, MODES, TOKENS, Mode, own
from helpers.ranks import grid
from helpers.twins import PlainBlock, options_of
from torch import Tensor, nn

import colossus
from colossus import layers
from colossus.comm import accounting
from colossus.context.parallel_context import ParallelContext
from colossus.gradients.gradient_axes import gradient_sum_axes
from colossus.layout.split_parameter import as_shards
from colossus.state.model_state_dict import full_state_dict

HIDDEN, HEADS, WIDE, RANK = 24, 6, 36, 6
PLAIN = Mode("1d", (1,))
ALL = {
    "none": PLAIN,
    **{name: MODES[name] for name in ("1d", "1d_sequence", "2d_2x3", "2.5d_depth2", "3d", "3d_2x1x2")},
}
#: 2.5D is 2D whose copies share the batch, as data ranks do: nothing of it is about modules; and of 3D the small one,
#: which is a rectangle, too
SOME = but(("2d_2x3", "2.5d_depth2", "3d"), ALL)


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


X, W = numbers(BATCH, TOKENS, HIDDEN), numbers(BATCH, TOKENS, HIDDEN, seed=9)


# -- what users do --------------------------------------------------------------------------------------------


class ScaledMLP(nn.Module):
    """An MLP of plain torch, put in the place of ours."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(HIDDEN))
        self.inner = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(F.softmax(x * self.scale, dim=-1)) + x.cumsum(-1)


class Lora(nn.Module):
    """Around a linear: ``second`` makes the matrix whose output joins that of the base."""

    def __init__(self, base: nn.Module, inputs: int, second: nn.Module) -> None:
        super().__init__()
        self.base, self.down, self.up = base, nn.Linear(inputs, RANK, bias=False), second

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


def overridden(base: type[nn.Module]) -> type[nn.Module]:
    """A subclass with a forward of its own around the one it has."""

    class Own(base):  # type: ignore[misc, valid-type]
        def forward(self, x: Tensor) -> Tensor:
            x = F.layer_norm(x, x.shape[-1:])
            return super().forward(x).flip(-1) * torch.linspace(1, 2, HIDDEN, dtype=x.dtype)

    return Own


def doubled(module: nn.Module, args: Any, out: Tensor) -> Tensor:
    return out * 2.0


def shifted(module: nn.Module, args: Any) -> Any:
    return (args[0] + 0.5, *args[1:])


def hook(name: str) -> Callable[[nn.Module, bool], None]:
    def change(block: nn.Module, ours: bool) -> None:
        block.get_submodule(name).register_forward_hook(doubled)
        block.get_submodule(name).register_forward_pre_hook(shifted)

    return change


def backward_hook(name: str) -> Callable[[nn.Module, bool], None]:
    def change(block: nn.Module, ours: bool) -> None:
        block.get_submodule(name).register_full_backward_hook(lambda module, into, out: (into[0] * 1.5,))
        block.get_submodule(name).register_full_backward_pre_hook(lambda module, out: (out[0] * 0.75,))

    return change


def replace_mlp(block: Any, ours: bool) -> None:
    block.mlp = ScaledMLP()


def replace_up(block: Any, ours: bool) -> None:
    block.mlp.up = nn.Linear(HIDDEN, WIDE)


def replace_norm(block: Any, ours: bool) -> None:
    block.mlp_norm = nn.LayerNorm(HIDDEN)
    block.attention_norm = nn.Identity()


def replace_by_ours(block: Any, ours: bool) -> None:
    block.mlp_norm = layers.Linear(HIDDEN, HIDDEN) if ours else nn.Linear(HIDDEN, HIDDEN)
    block.mlp = layers.LayerNorm(HIDDEN) if ours else nn.LayerNorm(HIDDEN)


def replace_out(block: Any, ours: bool) -> None:
    block.attention.out = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.LayerNorm(HIDDEN))


def lora_up(block: Any, ours: bool) -> None:
    second = layers.Linear(RANK, WIDE, bias=False, split="column") if ours else nn.Linear(RANK, WIDE, bias=False)
    block.mlp.up = Lora(block.mlp.up, HIDDEN, second)


def lora_down(block: Any, ours: bool) -> None:
    block.mlp.down = Lora(block.mlp.down, WIDE, nn.Linear(RANK, HIDDEN, bias=False))
    block.attention.out = Lora(block.attention.out, HIDDEN, nn.Linear(RANK, HIDDEN, bias=False))


def own_norm(block: Any, ours: bool) -> None:
    block.attention_norm = overridden(layers.LayerNorm if ours else nn.LayerNorm)(HIDDEN)


def own_row(block: Any, ours: bool) -> None:
    block.mlp.down = (
        overridden(layers.Linear)(WIDE, HIDDEN, split="row") if ours else overridden(nn.Linear)(WIDE, HIDDEN)
    )


def own_mlp(block: Any, ours: bool) -> None:
    block.mlp.__class__ = overridden(type(block.mlp))


def own_attention(block: Any, ours: bool) -> None:
    block.attention.__class__ = overridden(type(block.attention))


def instance_forward(block: Any, ours: bool) -> None:
    """As libraries do that wrap a model in place."""
    before = block.mlp.forward
    block.mlp.forward = lambda x: before(x.cumsum(-1)).cumsum(-1)


CHANGES: dict[str, Callable[[Any, bool], None]] = {
    **{f"forward hooks of {name}": hook(name) for name in ("mlp", "mlp_norm", "mlp.up", "mlp.down", "attention",
                                                          "attention_norm", "attention.out")},
    **{f"backward hooks of {name}": backward_hook(name) for name in ("mlp", "mlp_norm", "mlp.up", "mlp.down",
                                                                    "attention", "attention_norm", "attention.out")},
    "hooks of the block": lambda block, ours: (block.register_forward_hook(doubled), None)[1],
    **{change.__name__: change for change in (replace_mlp, replace_up, replace_norm, replace_by_ours, replace_out,
                                              lora_up, lora_down, own_norm, own_row, own_mlp,
                                              own_attention, instance_forward)},
}  # fmt: skip


# -- comparison -----------------------------------------------------------------------------------------------


def changed(name: str, options: dict[str, Any]) -> Callable[[], nn.Module]:
    def factory() -> nn.Module:
        block = layers.TransformerBlock(HIDDEN, HEADS, None, WIDE, **options)
        CHANGES[name](block, True)
        return block

    return factory


@cache
def reference_of(name: str) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Output, gradient of the input and gradients of plain torch, from the values that ours has in one process."""
    alone = ParallelContext(grid())
    plain = PlainBlock(options_of("gpt", HIDDEN, HEADS, WIDE)).double()
    CHANGES[name](plain, False)
    plain = plain.double()
    plain.load_state_dict(full_state_dict(colossus.build(changed(name, {}), alone, dtype=torch.float64), alone))
    x = X.clone().requires_grad_()
    out = plain(x)
    (out * W).sum().backward()
    assert x.grad is not None
    return out.detach(), x.grad, {key: p.grad for key, p in plain.named_parameters() if p.grad is not None}


def differences(context: ParallelContext, name: str, place: str, options: dict[str, Any]) -> list[str]:
    want, input_gradient, expected = reference_of(name)
    ours = colossus.build(changed(name, options), context, dtype=torch.float64)
    mine = own(context, X).clone().requires_grad_()
    out = layers.to_whole(ours(layers.to_residual(mine, ours.parallel) if place == "outer" else mine))
    (out * own(context, W)).sum().backward()
    lines = compare("output", out, own(context, want))
    lines += compare("gradient of the input", mine.grad, own(context, input_gradient))
    for parameter in ours.parameters():
        axes = gradient_sum_axes(parameter, context)
        if axes and parameter.grad is not None:
            torch.distributed.all_reduce(parameter.grad, group=context.group(axes).process_group)
    grads = full_state_dict(ours, context, gradients=True)
    assert grads.keys() == expected.keys()
    for key, reference in expected.items():
        lines += compare(f"gradient of {key}", grads[key], reference)
    return [f"{name}, {place}, {options}: {line}" for line in lines]


def compare(what: str, mine: Any, want: Any) -> list[str]:
    if mine.shape != want.shape:
        return [f"{what}: shape {tuple(mine.shape)}, not {tuple(want.shape)}"]
    error = (mine - want).abs().max().item() / max(1.0, want.abs().max().item())
    return [] if error < 1e-10 else [f"{what}: {error:.1e}"]


def check(mode: str, chosen: list[tuple[str, str, dict[str, Any]]]) -> None:
    """(change, layout of the block's input, options of the block), all in one fork."""
    for name, _, _ in chosen:
        reference_of(name)

    def body(context: ParallelContext) -> list[str]:
        return [line for case in chosen for line in differences(context, *case)]

    for lines in ALL[mode].run(body, timeout=120):
        assert not lines, "\n".join(lines[:40])


@pytest.mark.parametrize("mode", SOME)
@pytest.mark.rest("1d_sequence", "3d_2x1x2", "none")
def test_as_in_torch(mode: str) -> None:
    """Half of the changes at each place, the other half in the next mode."""
    first = list(ALL).index(mode)
    chosen = [(name, ("user", "outer")[(first + index) % 2], {}) for index, name in enumerate(CHANGES)]
    for name in ("forward hooks of mlp.up", "backward hooks of mlp", "replace_mlp", "lora_up"):
        chosen += [(name, "outer", {"activation_checkpoint": kind}) for kind in ("full", "selective")]
    check(mode, chosen)


@pytest.mark.long
@pytest.mark.parametrize("mode", ALL)
def test_as_in_torch_at_every_place(mode: str) -> None:
    check(mode, [(name, place, {}) for name in CHANGES for place in ("user", "outer")])


# -- how often, with which shapes, and what it costs ------------------------------------------------------------


def listened(context: ParallelContext) -> dict[str, Any]:
    """Every module of a block with all four kinds of hooks: calls, and shapes of the block's own."""
    block: Any = colossus.build(lambda: layers.TransformerBlock(HIDDEN, HEADS, None, WIDE), context)
    x = own(context, X.float()).requires_grad_()
    counts: dict[str, Counter[str]] = {kind: Counter() for kind in ("forward", "pre", "backward", "backward pre")}
    shapes: list[Any] = []

    def moved() -> tuple[int, float]:
        with accounting.count() as counter:
            layers.to_whole(block(x)).square().sum().backward()
        return counter.calls(), counter.bytes()

    def count(kind: str, name: str) -> Callable[..., None]:
        return lambda *_: counts[kind].update([name])

    alone = moved()
    alone_again = moved()
    grads = {name: p.grad.clone() for name, p in block.named_parameters()}
    for name, module in block.named_modules():
        module.register_forward_hook(count("forward", name))
        module.register_forward_pre_hook(count("pre", name))
        module.register_full_backward_hook(count("backward", name))
        module.register_full_backward_pre_hook(count("backward pre", name))
    block.register_forward_hook(lambda module, args, out: shapes.append((type(out), args[0].shape, out.shape)))
    block.zero_grad()
    heard = moved()
    heard_again = moved()
    with as_shards():
        same = all(torch.equal(grads[name], p.grad) for name, p in block.named_parameters())
    return {
        "moved": (alone, alone_again, heard, heard_again), "same": same, "shapes": shapes,
        "counts": counts, "names": [name for name, _ in block.named_modules()],
    }  # fmt: skip


@pytest.mark.parametrize("mode", SOME)
def test_hooks_are_called_once_and_move_nothing(mode: str) -> None:
    for record in ALL[mode].run(listened):
        # attention weights stay inside of torch's kernel: their dropout is a rate, never called
        called = {name: 2 for name in record["names"] if name != "attention.dropout"}
        for kind, counted in record["counts"].items():
            assert dict(counted) == called, kind
        assert len(set(record["moved"])) == 1
        assert record["same"]
        for kind, came, went in record["shapes"]:
            assert kind is Tensor
            assert came == went
            assert tuple(came[1:]) == (TOKENS, HIDDEN)
