"""The norms and MLPs of a transformer block by name, with what a count of parameters needs to know of them.

No torch: a config is checked, and parameters are counted, before any process starts.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from colossus.arithmetic import round_up


@dataclass(frozen=True)
class NormKind:
    """A norm over the features.

    Attributes:
        layer: ``module:class``, called with (hidden_size, eps=.., bias=..); without ``bias`` where it has none.
        eps: the default.
        has_bias: whether there is one in a model with biases.
    """

    layer: str
    eps: float
    has_bias: bool

    def make(self, hidden_size: int, bias: bool, eps: float | None = None) -> Any:
        options = {"bias": bias} if self.has_bias else {}
        return _load(self.layer)(hidden_size, eps=self.eps if eps is None else eps, **options)

    def num_parameters(self, hidden_size: int, bias: bool) -> int:
        return hidden_size * (2 if self.has_bias and bias else 1)


@dataclass(frozen=True)
class MLPKind:
    """A column linear, a function of each element, and a row linear.

    Attributes:
        layer: ``module:class``, called with (hidden_size, ffn_size, bias, init=.., out_init=.., bias_init=..).
        up: names of the outputs of the column linear, each ffn_size wide; one, named "", where it is not fused.
        ffn_size: the default, from hidden_size.
    """

    layer: str
    up: tuple[str, ...]
    ffn_size: Callable[[int], int]

    def make(self, hidden_size: int, ffn_size: int | None, bias: bool, **inits: Any) -> Any:
        return _load(self.layer)(hidden_size, ffn_size or 4 * hidden_size, bias, **inits)


def _load(path: str) -> Any:
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


LAYERNORM = NormKind("colossus.layers.norm:LayerNorm", eps=1e-5, has_bias=True)
RMSNORM = NormKind("colossus.layers.norm:RMSNorm", eps=1e-6, has_bias=False)
GELU = MLPKind("colossus.layers.mlp:MLP", ("",), lambda hidden: 4 * hidden)
#: with the approximation of gelu that GPT-2 was trained with
GELU_TANH = MLPKind("colossus.layers.mlp:TanhMLP", ("",), lambda hidden: 4 * hidden)
#: three matrices should cost what two do: 8/3 x hidden, up to a multiple of 64. It depends on the model alone: with a
#: size fitted to the tensor ranks, another plan would be another model
SWIGLU = MLPKind("colossus.layers.mlp:GatedMLP", ("gate", "value"), lambda hidden: round_up(-(-8 * hidden // 3), 64))
