"""The context in which a pipeline runs a stage for the first time: a guard against other ranks' tensors."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from colossus.error_place import located_error


class MetaTensorGuard(TorchFunctionMode):
    """Inside, an operation on a tensor of the meta device is an error: it belongs to a stage of another rank.

    Without it, some operations on CPU would return any numbers (uninitialized memory).

    Raises:
        ValueError: naming the stage, the operation, and the shape of the tensor.
    """

    def __init__(self, stage: int) -> None:
        super().__init__()
        self._stage = stage

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") != "__get__":
            for leaf in tree_leaves((args, kwargs)):
                if isinstance(leaf, Tensor) and leaf.is_meta:
                    name = getattr(func, "__name__", str(func))
                    raise located_error(
                        f"stage {self._stage}: {name} on a tensor of shape {tuple(leaf.shape)} that has no values "
                        f"here. It belongs to another stage, or somebody took hold of it while the model was built "
                        f"(w = self.head.weight in pipeline_blocks, say). {MUST_NAME_ALL}"
                    )
        return func(*args, **kwargs)


MUST_NAME_ALL = (
    "A PipelineBlock must name every module, parameter and buffer that it uses, and look them up when it is called"
)
