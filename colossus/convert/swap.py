"""Swaps in a model that is being built: each module of torch becomes the layer of ours that computes the same.

Tied parameters stay tied, values are those of the model's own constructor, names in the state dict stay. A lone layer
takes and returns whole activations, so it is right wherever torch's was.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from colossus.construct.allocate import value_of
from colossus.convert.derived_classes import added_member, class_attributes, torch_base, torch_class_of
from colossus.convert.expert_swap import routed_experts
from colossus.convert.layer_table import ROWS, Row
from colossus.convert.module_hooks import take_mode_and_hooks
from colossus.layers.derived_batch_norm import DerivedBatchNorm
from colossus.layers.linear import Linear
from colossus.layers.lm_head import LMHead
from colossus.layers.routed_experts import RoutedExperts
from colossus.layout.parameter_hooks import copy_attributes, share_hooks, user_hooks

#: the kinds of a linear: one of a pair, a head that returns its part of the logits, or a lone layer
COLUMN, ROW, HEAD, WHOLE = LINEARS = ("column", "row", "head", "whole")
#: the kind of experts that are spread over ranks; others are whole
EXPERTS = "experts"
#: the kind of a module that stays torch's own, whole on each rank
TORCH = "torch"
KINDS = (*LINEARS, EXPERTS, TORCH)
#: torch's modules with a table or a matrix
TABLES = (nn.Linear, nn.Embedding, nn.EmbeddingBag)


@dataclass(frozen=True)
class Swap:
    """The swap of one module of torch.

    Attributes:
        was: its class.
        became: the layer in its place, with its split; empty where the module stayed.
        why: why it stayed, or is whole; empty where nothing needs an explanation.
    """

    was: str
    became: str = ""
    why: str = ""


def is_conv1d(module: nn.Module) -> bool:
    """Return whether a module is transformers' linear, whose weight is [in, out]."""
    return type(module).__name__ == "Conv1D" and type(module).__module__ == "transformers.pytorch_utils"


def is_linear(module: nn.Module) -> bool:
    """Return whether a module computes what ``nn.Linear`` does."""
    return is_conv1d(module) or (isinstance(module, nn.Linear) and torch_class_of(module) is nn.Linear)


def weight_shape(module: nn.Module) -> tuple[int, int]:
    """Return (out, in) of a linear (`is_linear`)."""
    rows, columns = module.weight.shape  # type: ignore[misc]
    return (columns, rows) if is_conv1d(module) else (rows, columns)


def holders_of(model: nn.Module) -> dict[int, list[tuple[str, nn.Module, str]]]:
    """Return id of a parameter -> all its holders, as (name of the module, the module, name in it)."""
    holders: dict[int, list[tuple[str, nn.Module, str]]] = defaultdict(list)
    for name, module in model.named_modules():
        for leaf, parameter in module._parameters.items():
            if parameter is not None:
                holders[id(parameter)].append((name, module, leaf))
    return holders


def extra_behaviour(module: nn.Module) -> str:
    """Return why a module with a weight does more than its class; empty where it does not."""
    if "forward" in vars(module) or module._modules or not {*module._parameters} <= {"weight", "bias"}:
        return "its forward was replaced, or it has more members than its class"
    if is_conv1d(module) and user_hooks(module.weight):  # type: ignore[arg-type]
        return "a hook on its weight takes a gradient of [in, out], and a layer of colossus has [out, in]"
    return ""


class Swapper:
    """The replacement of modules of a model that is being built, in place. After an error the model cannot be used.

    Args:
        kinds: name of a linear -> one of `LINEARS`, of experts -> `EXPERTS`, of any module -> `TORCH`; the others are
            whole.
        reasons: name of a module -> why it is whole, or torch's own.

    Attributes:
        swaps: first name of each module that the table has a layer for -> its swap.
    """

    def __init__(self, model: nn.Module, kinds: Mapping[str, str], reasons: Mapping[str, str]) -> None:
        self._kinds, self._reasons = kinds, reasons
        self.swaps: dict[str, Swap] = {}
        self._holders = holders_of(model)
        self._layers: dict[int, nn.Module] = {}
        self._parameters: dict[int, nn.Parameter] = {}
        self._model = model

    def run(self) -> nn.Module:
        """Return the model, or its replacement if the model itself is such a module."""
        in_order = dict(self._model.named_modules())
        tables_first = sorted(in_order.items(), key=lambda item: torch_class_of(item[1]) is not nn.Embedding)
        for name, module in tables_first:  # a head that the model makes earlier may share a table
            row, was = row_for(module), type(module).__name__
            if self._kinds.get(name) == TORCH:
                if row is not None or isinstance(module, (*TABLES, _BatchNorm)):
                    self.swaps[name] = Swap(was, "", self._reasons.get(name, "a rule leaves it"))
            elif row is not None:
                self.swaps[name] = self._swap(name, module, row)
            elif self._kinds.get(name) == EXPERTS:
                self._put(module, routed_experts(module))
                self.swaps[name] = Swap(was, RoutedExperts.__name__)
            elif isinstance(module, _BatchNorm):
                DerivedBatchNorm(module, name)
                self.swaps[name] = Swap(
                    was, "", f"{why_derived(module)}; its batch statistics cover all ranks' samples"
                )
            elif isinstance(module, TABLES):
                self.swaps[name] = Swap(was, "", why_derived(module))
        self.swaps = {name: self.swaps[name] for name in in_order if name in self.swaps}
        for module in self._model.modules():
            for child_name, child in module._modules.items():
                if id(child) in self._layers:
                    module._modules[child_name] = self._layers[id(child)]
            for leaf, parameter in module._parameters.items():  # a parent may also have the bias
                if id(parameter) in self._parameters:
                    module._parameters[leaf] = self._parameters[id(parameter)]
        return self._layers.get(id(self._model), self._model)

    def _swap(self, name: str, module: nn.Module, row: Row) -> Swap:
        was, kind = type(module).__name__, self._kinds.get(name, WHOLE)
        why = self._why_it_stays(module)
        try:
            layer = None if why else self._layer(module, row, kind)
        except ValueError as error:
            if kind in (COLUMN, ROW):
                raise
            why, layer = str(error).partition(": ")[2] or str(error), None
        if layer is None:
            if kind in (COLUMN, ROW):
                raise ValueError(f"{name} ({was}) cannot be {kind!r}: {why}")
            return Swap(was, "", why)  # the loss also takes the whole logits of a head that stays
        self._put(module, layer)
        split = f"({kind})" if kind in (COLUMN, ROW) else ""
        return Swap(was, type(layer).__name__ + split, self._reasons.get(name, "") if kind == WHOLE else "")

    def _put(self, module: nn.Module, layer: nn.Module) -> None:
        """Put a layer in place of a module, with all attributes and hooks of the module."""
        for leaf, parameter in module._parameters.items():
            if parameter is not None:
                new = self._parameters.setdefault(id(parameter), getattr(layer, leaf))
                setattr(layer, leaf, new.requires_grad_(parameter.requires_grad))
                copy_attributes(new, parameter)
                share_hooks(new, parameter)
        take_mode_and_hooks(layer, module)
        of_class = class_attributes(module, torch_class_of(module))
        vars(layer).update({key: value for key, value in of_class.items() if not hasattr(layer, key)})
        vars(layer).update({key: value for key, value in vars(module).items() if key not in vars(layer)})
        self._layers[id(module)] = layer

    def _why_it_stays(self, module: nn.Module) -> str:
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and (module.max_norm or module.scale_grad_by_freq):
            return "max_norm and scale_grad_by_freq change or weigh rows by the lookups of one rank"
        if why := extra_behaviour(module):
            return why
        weight = module._parameters.get("weight")
        for name, other, leaf in self._holders[id(weight)] if weight is not None else ():
            if other is module:
                continue
            kinds = torch_class_of(module), torch_class_of(other)
            is_table = kinds[1] is nn.Embedding and id(other) in self._layers  # a head or another table shares it
            may_share = kinds[0] is nn.Embedding and kinds[1] in (nn.Embedding, nn.Linear)
            if leaf == "weight" and (is_table or may_share) and self._kinds.get(name) != TORCH:
                continue
            return f"its weight is also {'.'.join(filter(None, (name, leaf)))}"
        return ""

    def _layer(self, module: nn.Module, row: Row, kind: str) -> nn.Module:
        """Return the layer for a module, with the values of the module's parameters."""
        weight, is_transposed = module._parameters.get("weight"), is_conv1d(module)
        more: dict[str, Any] = {}
        if weight is not None:
            more["dtype"] = weight.dtype
        if weight is not None and id(weight) not in self._parameters:  # else an earlier layer has its values
            more["init"] = value_of(weight, is_transposed=is_transposed)
        if module._parameters.get("bias") is not None:
            more["bias_init"] = value_of(module._parameters["bias"])  # type: ignore[arg-type]
        if not is_linear(module):
            return row.ours(**row.arguments_of_torch(module), **more)
        assert weight is not None
        out_features, in_features = weight_shape(module)
        tables = [self._layers[id(other)] for _, other, _ in self._holders[id(weight)] if id(other) in self._layers]
        if tables or kind == HEAD:
            if kind in (COLUMN, ROW):
                raise ValueError("it shares the weight of an embedding: it can be 'head' or 'whole'")
            table: Any = tables[0] if tables else None
            has_bias = "bias_init" in more
            return LMHead(in_features, out_features, has_bias, tied_to=table, whole=kind != HEAD, **more)
        split = kind if kind in (COLUMN, ROW) else None
        return Linear(in_features, out_features, "bias_init" in more, split=split, **more)


def row_for(module: nn.Module) -> Row | None:
    """Return the row of the layer that computes the same as a class of torch.

    Norms over features stay torch's: they are between pairs, where features are whole.
    """
    kind = nn.Linear if is_conv1d(module) else torch_class_of(module)
    if kind in (nn.LayerNorm, nn.RMSNorm):
        return None
    return next((row for row in ROWS if row.torch is kind), None)


def why_derived(module: nn.Module) -> str:
    """Return why a module of a class derived from one in the table stays."""
    if type(module) is NonDynamicallyQuantizableLinear:
        return "nn.MultiheadAttention reads its weight itself"
    return f"its class has a {added_member(module, torch_base(module))} of its own"
