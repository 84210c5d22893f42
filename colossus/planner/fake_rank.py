"""One rank of a world of any size in this process. Collectives end at once; tensors have sizes but no values."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    unset_fake_temporarily,
)
from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend

from colossus.comm import shared_memory
from colossus.config import Config, ConfigError
from colossus.config.errors import as_config_errors
from colossus.config.plans import name_of
from colossus.construct.build_model import replace_tensors, wide_parameters
from colossus.context.grid import build_grid
from colossus.context.parallel_context import ParallelContext
from colossus.context.precision import LOW, Precision
from colossus.data_parallel.zero.blocks import placed_parameters
from colossus.data_parallel.zero.flat_rows import Dtypes
from colossus.layout.parameter import spec_of
from colossus.tensor_parallel.dtypes import set_gradient_dtype


@contextmanager
def fake_world(world_size: int, rank: int) -> Iterator[None]:
    """Make this process one rank of a world with torch's fake process groups, inside the context.

    Initializing a group lets torch print the rank before every line of a traceback. The context restores the hook of
    uncaught errors, so that later tracebacks have no rank.

    Raises:
        ValueError: torch.distributed is initialized in this process.
    """
    if dist.is_initialized():
        raise ValueError("torch.distributed is initialized in this process: predict the cost of a plan in another one")
    shared, excepthook = shared_memory.enable(False), sys.excepthook
    if world_size > 1:
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        sys.excepthook = excepthook
        shared_memory.enable(shared)


@contextmanager
def errors_of_model(config: Config) -> Iterator[None]:
    """Turn errors of a model or its data into ConfigErrors, inside the context; a config without them is one, too."""
    if config.model is None or config.data is None:
        missing = "model" if config.model is None else "data"
        raise ConfigError(f"{missing}: the config has none, and the cost of a plan depends on it", config.source)
    try:
        with as_config_errors(source=config.source):
            yield
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise ConfigError(
            f"the cost of {name_of(config.model.type)} cannot be predicted: sizes of its tensors depend on the values "
            f"of a batch ({error})",
            config.source,
        ) from error


@contextmanager
def fake_rank(config: Config) -> Iterator[ParallelContext]:
    """Yield the context of the first rank of the config's plan, in a `fake_world`."""
    with fake_world(build_grid(config.parallel).world_size, rank=0):
        context = ParallelContext.from_config(config, rank=0)
        try:
            with context:
                yield context
        finally:
            context.close()


def give_sizes(model: nn.Module, precision: Precision, run: Callable[[str], bool] = lambda name: True) -> None:
    """Replace a model's meta tensors by fake CPU tensors of the run's dtypes. Call it under the fake mode.

    All parameters become plain ones, also those that a rank stores a part of: only their users run.

    Args:
        model: the model.
        precision: dtypes of the run.
        run: whether the tensor of this name is used; the others stay on meta, which is faster.
    """
    wide = wide_parameters(model)

    def dtype_of(tensor: Tensor, usual: torch.dtype) -> torch.dtype:
        return usual if tensor.is_floating_point() else tensor.dtype

    def fake(tensor: Tensor, path: str, leaf: str) -> Tensor:
        if run(f"{path}.{leaf}" if path else leaf):
            return allocate(tensor, "cpu")
        with unset_fake_temporarily():
            return allocate(tensor, "meta")

    def allocate(tensor: Tensor, device: str) -> Tensor:
        if not isinstance(tensor, nn.Parameter):
            return torch.empty(tensor.shape, dtype=dtype_of(tensor, precision.data), device=device)
        dtype = dtype_of(tensor, precision.data if id(tensor) in wide else precision.params)
        param = nn.Parameter(torch.empty(tensor.shape, dtype=dtype, device=device), requires_grad=tensor.requires_grad)
        vars(param).update(vars(tensor))
        if dtype in LOW:
            set_gradient_dtype(param, precision.gradients)
        return param

    replace_tensors(model, fake)


@contextmanager
def gathered_parameters(model: nn.Module, precision: Precision) -> Iterator[None]:
    """Give a model's fake parameters the dtypes in which ZeRO gathers them, inside the context."""
    before: list[tuple[nn.Parameter, Tensor, torch.dtype | None, torch.dtype | None]] = []
    for placed in placed_parameters(model):
        param = placed.param
        dtypes = Dtypes.of(param, precision, is_product=placed.is_product)
        if param.device.type == "meta" or param.dtype == dtypes.computed:
            continue
        before.append((param, param.data, param.grad_dtype, spec_of(param).gradient_dtype))
        param.data = torch.empty(param.shape, dtype=dtypes.computed, device=param.device)
        set_gradient_dtype(param, dtypes.gradient)
    try:
        yield
    finally:
        for param, data, grad_dtype, declared in before:
            param.grad, param.data = None, data
            param.grad_dtype, spec_of(param).gradient_dtype = grad_dtype, declared
