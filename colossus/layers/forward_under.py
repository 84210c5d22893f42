"""The forward of a module of torch that runs under a mode of torch's functions."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from torch import nn

from colossus.comm.autograd import uncompiled


class ForwardUnder:
    """A replacement of ``module.forward``, even of a user's own; hooks run outside it.

    It is an object, so that a copy of the module has one of its own. A subclass provides the mode of the forward.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module, self._replaced = module, vars(module).get("forward")
        vars(module)["forward"] = self

    def mode(self) -> AbstractContextManager[Any]:
        """Return the context manager that is entered for a forward."""
        raise NotImplementedError

    @uncompiled
    def __call__(self, *args: Any, **options: Any) -> Any:
        module = self.module
        with self.mode():
            if self._replaced is not None:
                return self._replaced(*args, **options)
            return type(module).forward(module, *args, **options)
