"""A model that writes to its input in place, under a pipeline: refused, since other ranks have that input as it was."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from colossus.nest import tensors


@contextmanager
def refuse_writes(value: Any, model: nn.Module, *, names_writer: bool) -> Iterator[None]:
    """Around the forward of the first stage: an error if it writes to one of the tensors that it is called with.

    The last stage calls the loss with the batch as it was, where one process would call it with what the model has
    written: a tensor's version counter tells which tensor it is. Without a pipeline both see the same memory, as in
    plain torch, and nothing has to be refused.

    Args:
        value: what the stage is called with: a nest of tensors.
        model: whose modules are named.
        names_writer: look after each module's forward whether it was this one, which takes time.

    Raises:
        ValueError: naming the tensor, and the module if it was looked for.
    """
    watched = [(path, x, x._version) for path, x in tensors(value) if not x.is_inference()]
    writers: list[nn.Module] = []

    def look(module: nn.Module, args: Any, output: Any) -> None:
        if not writers and any(x._version != version for _, x, version in watched):
            writers.append(module)

    hook = register_module_forward_hook(look) if names_writer else None
    try:
        yield
    finally:
        if hook is not None:
            hook.remove()
    found = next(((path, x) for path, x, version in watched if x._version != version), None)
    if found is not None:
        names = {id(module): name for name, module in model.named_modules()}
        who = [f"{names.get(id(module), '')} ({type(module).__name__})".lstrip() for module in writers]
        raise ValueError(
            f"{who[0] if who else 'the model'} writes to its input in place ({_describe(*found)}): under a pipeline "
            f"the loss, which is computed on the last stage, would read the batch as it was, and in one process what "
            f"was written. Write to a copy: x = x - mean instead of x -= mean, or x = x.clone() first"
        )


def _describe(path: str, x: Tensor) -> str:
    return f"inputs{path}, {str(x.dtype).removeprefix('torch.')}{list(x.shape)}"
