"""Initial values for ``init=`` and ``bias_init=`` of the layers."""

from colossus.construct.initial_values import Constant, Normal, Uniform, Values, ZeroRow, torch_linear

__all__ = ["Constant", "Normal", "Uniform", "Values", "ZeroRow", "torch_linear"]
