"""A layer in a tensor mode against plain torch in one process: outputs, losses and all gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from helpers.modes import own
from helpers.ranks import grid
from torch import Tensor, nn

import colossus
from colossus import layers
from colossus.context.parallel_context import ParallelContext
from colossus.gradients.gradient_axes import gradient_sum_axes
from colossus.layers.model_parallel import model_parallel_of
from colossus.state.model_state_dict import full_state_dict

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


@dataclass(frozen=True)
class Reference:
    """What plain torch makes of a case in one process, from the values that our layer starts with there."""

    case: Case
    output: Tensor
    labels: Tensor
    inputs: list[Tensor | None]
    parameters: dict[str, Tensor]


_references: dict[tuple[int, torch.dtype], Reference] = {}


def reference_of(case: Case, dtype: torch.dtype) -> Reference:
    """Computed once: forked ranks find what the parent has asked for before."""
    key = (id(case), dtype)
    if key not in _references:
        _references[key] = _compute_reference(case, dtype)
    return _references[key]


def _compute_reference(case: Case, dtype: torch.dtype) -> Reference:
    alone = ParallelContext(grid())
    plain = case.plain().to(dtype)
    plain.load_state_dict(
        {**plain.state_dict(), **full_state_dict(colossus.build(case.ours, alone, dtype=dtype), alone)}
    )
    inputs = [leaf(x, dtype) for x in case.inputs]
    want = plain(*inputs)
    labels = integers(want.shape[-1], *want.shape[:-1])
    labels[0] = -100
    if case.loss:
        log_sum = torch.logsumexp(want, -1)
        keep = labels != -100
        total = F.cross_entropy(want.flatten(0, -2), labels.flatten(), reduction="sum", label_smoothing=0.1)
        total = total + 0.01 * (log_sum.square() * keep).sum()
        best = ((want.topk(2).indices == labels.unsqueeze(-1)).any(-1) & keep).sum()
        output = torch.stack([total.detach().double(), keep.sum(), best, keep.sum()])
    else:
        output, total = want.detach(), (want * _weights_of(want)).sum()
    total.backward()
    parameters = {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}
    return Reference(case, output, labels, [x.grad for x in inputs], parameters)


def _weights_of(output: Tensor) -> Tensor:
    return numbers(*output.shape, seed=9).to(output.dtype)


def differences(context: ParallelContext, case: Case, dtype: torch.dtype) -> Iterator[str]:
    """What differs from plain torch on this rank, in words."""
    want = reference_of(case, dtype)
    ours = colossus.build(case.ours, context, dtype=dtype)
    mine = [leaf(own(context, x), dtype) for x in case.inputs]
    out = ours(*mine)
    if case.loss:
        labels = own(context, want.labels)
        part, count = layers.cross_entropy(out, labels, label_smoothing=0.1, z_loss=0.01)
        right, valid = layers.accuracy(out, labels, k=2)
        ours_numbers = torch.stack([part.detach().double(), count.double(), right, valid])
        axes = model_parallel_of(context).regions.whole.batch
        if axes:
            torch.distributed.all_reduce(ours_numbers, group=context.group(axes).process_group)
        yield from close("loss and accuracy", ours_numbers, want.output, dtype)
        part.backward()
    else:
        out = layers.to_whole(out)
        yield from close("output", out, own(context, want.output), dtype)
        (out * own(context, _weights_of(want.output))).sum().backward()
    for index, (x, gradient) in enumerate(zip(mine, want.inputs, strict=True)):
        if gradient is not None:
            yield from close(f"gradient of input {index}", x.grad, own(context, gradient), dtype)
    for parameter in ours.parameters():
        if parameter.grad is not None and parameter.grad.is_sparse:
            parameter.grad = parameter.grad.to_dense()
        axes = gradient_sum_axes(parameter, context)
        if axes and parameter.grad is not None:
            torch.distributed.all_reduce(parameter.grad, group=context.group(axes).process_group)
    grads = full_state_dict(ours, context, gradients=True)
    if grads.keys() != want.parameters.keys():
        yield f"gradients of {sorted(grads)}, expected {sorted(want.parameters)}"
        return
    for name, gradient in want.parameters.items():
        yield from close(f"gradient of {name}", grads[name], gradient, dtype)


def close(what: str, mine: Tensor, want: Tensor, dtype: torch.dtype) -> Iterator[str]:
    if mine.shape != want.shape:
        yield f"{what}: shape {tuple(mine.shape)}, not {tuple(want.shape)}"
        return
    scale = max(1.0, want.detach().abs().max().item())
    gap = (mine.detach() - want.detach()).abs().max().item() / scale
    if not gap <= TOLERANCE[dtype]:
        yield f"{what} differs by {gap:.3g} of {scale:.3g}"


def prepare(chosen: list[Case], dtypes: list[torch.dtype]) -> None:
    """Compute what `compare_all` compares with, in the parent of the ranks that will ask for it."""
    for case in chosen:
        for dtype in dtypes:
            reference_of(case, dtype)


def compare_all(context: ParallelContext, chosen: list[Case], dtypes: list[torch.dtype]) -> list[str]:
    lines = []
    for case in chosen:
        for dtype in dtypes:
            lines += [f"{case.title}, {dtype}: {words}" for words in differences(context, case, dtype)]
    return lines
