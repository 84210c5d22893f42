"""Build a model under a parallel context: on meta first, then every rank's own values."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from colossus.context.parallel_context import ParallelContext, current_context
from colossus.layers import deferred
from colossus.layers.layer import Layer
from colossus.layout.parameter import attach, spec_of


def build(
    factory: Callable[[], nn.Module],
    context: ParallelContext | None = None,
    *,
    dtype: torch.dtype | None = None,
    materialize: bool = True,
) -> nn.Module:
    """The model that ``factory`` makes, with this rank's shards only.

    Initial values depend on the context's seed, the full name and the full shape of each parameter, not on the plan.

    Args:
        factory: a class or function without arguments.
        context: by default the current one.
        dtype: of all floating-point parameters and buffers; by default what the constructor chose.
        materialize: False leaves everything on the meta device (to check sizes, or to count).

    Raises:
        ValueError: for sizes the plan cannot split, and for `torch.nn.init` on a parameter of our layers.
    """
    context = context or current_context()
    with context:
        model, recorder = deferred.record(factory)
    if not isinstance(model, nn.Module):
        raise ValueError(f"the model factory returned a {type(model).__name__}, not a torch.nn.Module")
    for name, module in model.named_modules():
        if isinstance(module, Layer):
            module.full_name = name
    for name, parameter in model.named_parameters():
        spec = spec_of(parameter)
        if spec is not None:
            spec.name = name
    if materialize:
        _materialize(model, recorder, context, dtype)
    return model


def _materialize(
    model: nn.Module, recorder: deferred.Recorder, context: ParallelContext, dtype: torch.dtype | None
) -> None:
    done: dict[int, nn.Parameter] = {}
    for path, module in model.named_modules():
        for leaf, parameter in list(module._parameters.items()):
            if parameter is None:
                continue
            if id(parameter) not in done:
                done[id(parameter)] = _real_parameter(parameter, path, leaf, recorder, context, dtype)
            module._parameters[leaf] = done[id(parameter)]
        for leaf, buffer in list(module._buffers.items()):
            if buffer is not None:
                value = _plain_value(buffer, _join(path, leaf), recorder, context)
                module._buffers[leaf] = _cast(value, dtype).to(context.device)


def _real_parameter(
    parameter: nn.Parameter,
    path: str,
    leaf: str,
    recorder: deferred.Recorder,
    context: ParallelContext,
    dtype: torch.dtype | None,
) -> nn.Parameter:
    spec = spec_of(parameter)
    if spec is None:
        value = _plain_value(parameter.data, _join(path, leaf), recorder, context)
        return nn.Parameter(_cast(value, dtype).to(context.device), requires_grad=parameter.requires_grad)

    def key_of(part: str) -> int:
        return context.rng.key("init", _join(path, part, leaf))

    kind = dtype if dtype is not None and parameter.is_floating_point() else parameter.dtype
    value = deferred.draw(
        spec, tuple(parameter.shape), context, key_of=key_of, dtype=kind, device=context.device
    )
    return attach(nn.Parameter(value, requires_grad=parameter.requires_grad), spec)


def _plain_value(tensor: Tensor, name: str, recorder: deferred.Recorder, context: ParallelContext) -> Tensor:
    if not tensor.is_meta:
        return tensor
    return recorder.value(tensor, seed=context.rng.key("init", name)).clone()


def _cast(value: Tensor, dtype: torch.dtype | None) -> Tensor:
    return value.to(dtype) if dtype is not None and value.is_floating_point() else value


def _join(*parts: str) -> str:
    return ".".join(filter(None, parts))
