"""A layer in a tensor mode against plain torch in one process: outputs, losses and all gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from helpers.modes import own
from torch import Tensor, nn

import colossus
from colossus import layers
from colossus.checkpoint.state_dict import full_state_dict
from colossus.context.parallel_context import ParallelContext
from colossus.engine.gradients.axes import gradient_sum_axes
from colossus.layers.model_parallel import model_parallel_of

TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}


@dataclass(frozen=True)
class Case:
    """A layer of ours, the same of torch, and inputs: global, floating-point ones with a gradient."""

    title: str
    ours: Callable[[], nn.Module]
    plain: Callable[[], nn.Module]
    inputs: tuple[Tensor, ...]
    loss: bool = field(default=False)


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def integers(high: int, *shape: int) -> Tensor:
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(1))


def leaf(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype).clone().requires_grad_() if x.is_floating_point() else x


def differences(context: ParallelContext, case: Case, dtype: torch.dtype) -> Iterator[str]:
    """What differs from plain torch on this rank, in words."""
    ours = colossus.build(case.ours, context, dtype=dtype)
    plain = case.plain().to(dtype)
    plain.load_state_dict({**plain.state_dict(), **full_state_dict(ours, context)})
    mine = [leaf(own(context, x), dtype) for x in case.inputs]
    whole = [leaf(x, dtype) for x in case.inputs]
    out, want = ours(*mine), plain(*whole)
    if case.loss:
        labels = integers(want.shape[-1], *want.shape[:-1])
        labels[0] = -100
        part, count = layers.cross_entropy(out, own(context, labels), label_smoothing=0.1, z_loss=0.01)
        right, valid = layers.accuracy(out, own(context, labels), k=2)
        ours_numbers = torch.stack([part.detach().double(), count.double(), right, valid])
        axes = model_parallel_of(context).regions.user.batch
        if axes:
            torch.distributed.all_reduce(ours_numbers, group=context.group(axes).process_group)
        log_sum = torch.logsumexp(want, -1)
        keep = labels != -100
        total = F.cross_entropy(want.flatten(0, -2), labels.flatten(), reduction="sum", label_smoothing=0.1)
        total = total + 0.01 * (log_sum.square() * keep).sum()
        best = ((want.topk(2).indices == labels.unsqueeze(-1)).any(-1) & keep).sum()
        yield from close("loss and accuracy", ours_numbers,
                         torch.stack([total.detach().double(), keep.sum(), best, keep.sum()]), dtype)  # fmt: skip
        part.backward()
        total.backward()
    else:
        out = layers.to_user(out)
        weights = numbers(*want.shape, seed=9).to(dtype)
        yield from close("output", out, own(context, want), dtype)
        (out * own(context, weights)).sum().backward()
        (want * weights).sum().backward()
    for index, (x, reference) in enumerate(zip(mine, whole, strict=True)):
        if x.is_floating_point():
            yield from close(f"gradient of input {index}", x.grad, own(context, reference.grad), dtype)
    for parameter in ours.parameters():
        axes = gradient_sum_axes(parameter, context)
        if axes and parameter.grad is not None:
            torch.distributed.all_reduce(parameter.grad, group=context.group(axes).process_group)
    grads = full_state_dict(ours, context, gradients=True)
    expected = {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}
    if grads.keys() != expected.keys():
        yield f"gradients of {sorted(grads)}, expected {sorted(expected)}"
        return
    for name, reference in expected.items():
        yield from close(f"gradient of {name}", grads[name], reference, dtype)


def close(what: str, mine: Tensor, want: Tensor, dtype: torch.dtype) -> Iterator[str]:
    if mine.shape != want.shape:
        yield f"{what}: shape {tuple(mine.shape)}, not {tuple(want.shape)}"
        return
    scale = max(1.0, want.detach().abs().max().item())
    gap = (mine.detach() - want.detach()).abs().max().item() / scale
    if not gap <= TOLERANCE[dtype]:
        yield f"{what} differs by {gap:.3g} of {scale:.3g}"


def compare_all(context: ParallelContext, chosen: list[Case], dtypes: list[torch.dtype]) -> list[str]:
    found = []
    for case in chosen:
        for dtype in dtypes:
            found += [f"{case.title}, {dtype}: {words}" for words in differences(context, case, dtype)]
    return found
