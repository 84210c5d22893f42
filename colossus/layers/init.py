"""Initial values for ``init=`` and ``bias_init=`` of the layers: `colossus.construct.init` under its public name."""

from colossus.construct.init import Constant, Normal, Uniform, Values, ZeroRow, torch_linear

__all__ = ["Constant", "Normal", "Uniform", "Values", "ZeroRow", "torch_linear"]
