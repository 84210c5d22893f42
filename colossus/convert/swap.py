"""Modules of torch in a model that is being built, each replaced by the layer of ours that computes the same.

What is tied stays tied, values are those that the model's own constructor gave, names in the state dict stay. A layer
that is alone takes and gives whole activations, so it is right wherever torch's was.
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
from colossus.convert.derived_classes import class_attributes, torch_class_of, what_it_adds
from colossus.convert.expert_swap import routed_experts
from colossus.convert.layer_table import ROWS, Row
from colossus.convert.module_hooks import take_mode_and_hooks
from colossus.layers.derived_batch_norm import DerivedBatchNorm
from colossus.layers.linear import Linear
from colossus.layers.lm_head import LMHead
from colossus.layers.routed_experts import RoutedExperts
from colossus.layout.parameter_hooks import take_attributes, take_hooks, user_hooks

#: what a linear can become: one of a pair, a head that gives its part of the logits, or alone
COLUMN, ROW, HEAD, WHOLE = LINEARS = ("column", "row", "head", "whole")
#: what experts become, which are else whole
EXPERTS = "experts"
#: any module stays torch's own, whole on each rank
TORCH = "torch"
KINDS = (*LINEARS, EXPERTS, TORCH)
#: of torch, hold a table or a matrix
TABLES = (nn.Linear, nn.Embedding, nn.EmbeddingBag)


@dataclass(frozen=True)
class Swap:
    """What became of a module of torch.

    Attributes:
        was: its class.
        became: the layer in its place, with its split; empty where it stayed.
        why: it stayed, or is whole; empty where nothing is to be said.
    """

    was: str
    became: str = ""
    why: str = ""


def is_conv1d(module: nn.Module) -> bool:
    """Whether it is transformers' linear whose weight is [in, out]."""
    return type(module).__name__ == "Conv1D" and type(module).__module__ == "transformers.pytorch_utils"


def is_linear(module: nn.Module) -> bool:
    """Return whether a module computes what ``nn.Linear`` does."""
    return is_conv1d(module) or (isinstance(module, nn.Linear) and torch_class_of(module) is nn.Linear)


def weight_shape(module: nn.Module) -> tuple[int, int]:
    """(out, in) of what `is_linear`."""
    rows, columns = module.weight.shape  # type: ignore[misc]
    return (columns, rows) if is_conv1d(module) else (rows, columns)


def holders_of(model: nn.Module) -> dict[int, list[tuple[str, nn.Module, str]]]:
    """By id of a parameter, all that hold it: name of the module, the module, name in it."""
    found: dict[int, list[tuple[str, nn.Module, str]]] = defaultdict(list)
    for name, module in model.named_modules():
        for leaf, parameter in module._parameters.items():
            if parameter is not None:
                found[id(parameter)].append((name, module, leaf))
    return found


def why_not_its_class(module: nn.Module) -> str:
    """Why a module with a weight is not what its class says; empty where it is."""
    if "forward" in vars(module) or module._modules or not {*module._parameters} <= {"weight", "bias"}:
        return "its forward was replaced, or it holds more than its class does"
    if is_conv1d(module) and user_hooks(module.weight):  # type: ignore[arg-type]
        return "a hook on its weight takes a gradient of [in, out], and a layer of colossus has [out, in]"
    return ""


class Swapper:
    """Replaces modules of a model that is being built, in place; of an error the model is of no use any more.

    Args:
        kinds: name of a linear -> one of `LINEARS`, of experts -> `EXPERTS`, of any module -> `TORCH`; the others are
            whole.
        reasons: name of a module -> why it is whole, or torch's own.

    Attributes:
        swaps: what became of each module that the table has a layer for, by its first name.
    """

    def __init__(self, model: nn.Module, kinds: Mapping[str, str], reasons: Mapping[str, str]) -> None:
        self._kinds, self._reasons = kinds, reasons
        self.swaps: dict[str, Swap] = {}
        self._holders = holders_of(model)
        self._made: dict[int, nn.Module] = {}
        self._parameters: dict[int, nn.Parameter] = {}
        self._model = model

    def run(self) -> nn.Module:
        """The model, or what takes its place where it is such a module itself."""
        in_order = dict(self._model.named_modules())
        tables_first = sorted(in_order.items(), key=lambda item: torch_class_of(item[1]) is not nn.Embedding)
        for name, module in tables_first:  # which a head may share that the model makes before them
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
                self.swaps[name] = Swap(was, "", f"{why_derived(module)}; batch statistics are of all ranks' samples")
            elif isinstance(module, TABLES):
                self.swaps[name] = Swap(was, "", why_derived(module))
        self.swaps = {name: self.swaps[name] for name in in_order if name in self.swaps}
        for module in self._model.modules():
            for child_name, child in module._modules.items():
                if id(child) in self._made:
                    module._modules[child_name] = self._made[id(child)]
            for leaf, parameter in module._parameters.items():  # a bias that its parent holds, too
                if id(parameter) in self._parameters:
                    module._parameters[leaf] = self._parameters[id(parameter)]
        return self._made.get(id(self._model), self._model)

    def _swap(self, name: str, module: nn.Module, row: Row) -> Swap:
        was, kind = type(module).__name__, self._kinds.get(name, WHOLE)
        why = self._why_it_stays(module)
        try:
            made = None if why else self._layer(module, row, kind)
        except ValueError as error:
            if kind in (COLUMN, ROW):
                raise
            why, made = str(error).partition(": ")[2] or str(error), None
        if made is None:
            if kind in (COLUMN, ROW):
                raise ValueError(f"{name} ({was}) cannot be {kind!r}: {why}")
            return Swap(was, "", why)  # a head that gives all of the logits, which the loss takes, too
        self._put(module, made)
        split = f"({kind})" if kind in (COLUMN, ROW) else ""
        return Swap(was, type(made).__name__ + split, self._reasons.get(name, "") if kind == WHOLE else "")

    def _put(self, module: nn.Module, made: nn.Module) -> None:
        """Let a layer take the place of a module, with all that was put onto that."""
        for leaf, parameter in module._parameters.items():
            if parameter is not None:
                new = self._parameters.setdefault(id(parameter), getattr(made, leaf))
                setattr(made, leaf, new.requires_grad_(parameter.requires_grad))
                take_attributes(new, parameter)
                take_hooks(new, parameter)
        take_mode_and_hooks(made, module)
        of_class = class_attributes(module, torch_class_of(module))
        vars(made).update({key: value for key, value in of_class.items() if not hasattr(made, key)})
        vars(made).update({key: value for key, value in vars(module).items() if key not in vars(made)})
        self._made[id(module)] = made

    def _why_it_stays(self, module: nn.Module) -> str:
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and (module.max_norm or module.scale_grad_by_freq):
            return "max_norm and scale_grad_by_freq change or weigh rows by what one rank looks up"
        if why := why_not_its_class(module):
            return why
        weight = module._parameters.get("weight")
        for name, other, leaf in self._holders[id(weight)] if weight is not None else ():
            if other is module:
                continue
            kinds = torch_class_of(module), torch_class_of(other)
            is_table = kinds[1] is nn.Embedding and id(other) in self._made  # of words, for a head or another table
            may_share = kinds[0] is nn.Embedding and kinds[1] in (nn.Embedding, nn.Linear)
            if leaf == "weight" and (is_table or may_share) and self._kinds.get(name) != TORCH:
                continue
            return f"its weight is {'.'.join(filter(None, (name, leaf)))}, too"
        return ""

    def _layer(self, module: nn.Module, row: Row, kind: str) -> nn.Module:
        """The layer for a module; its values are those of the module's parameters."""
        weight, is_transposed = module._parameters.get("weight"), is_conv1d(module)
        more: dict[str, Any] = {}
        if weight is not None:
            more["dtype"] = weight.dtype
        if weight is not None and id(weight) not in self._parameters:  # else a layer made before has its values
            more["init"] = value_of(weight, is_transposed=is_transposed)
        if module._parameters.get("bias") is not None:
            more["bias_init"] = value_of(module._parameters["bias"])  # type: ignore[arg-type]
        if not is_linear(module):
            return row.ours(**row.arguments_of_torch(module), **more)
        assert weight is not None
        out_features, in_features = weight_shape(module)
        tables = [self._made[id(other)] for _, other, _ in self._holders[id(weight)] if id(other) in self._made]
        if tables or kind == HEAD:
            if kind in (COLUMN, ROW):
                raise ValueError("it shares the weight of an embedding: it can be 'head' or 'whole'")
            table: Any = tables[0] if tables else None
            has_bias = "bias_init" in more
            return LMHead(in_features, out_features, has_bias, tied_to=table, whole=kind != HEAD, **more)
        split = kind if kind in (COLUMN, ROW) else None
        return Linear(in_features, out_features, "bias_init" in more, split=split, **more)


def row_for(module: nn.Module) -> Row | None:
    """Return the row of what computes the same as a class of torch. Norms over features stay torch's: between pairs,
    where they are, features are whole."""
    kind = nn.Linear if is_conv1d(module) else torch_class_of(module)
    if kind in (nn.LayerNorm, nn.RMSNorm):
        return None
    return next((row for row in ROWS if row.torch is kind), None)


def why_derived(module: nn.Module) -> str:
    """Return why a module of a class derived from one in the table stays."""
    if type(module) is NonDynamicallyQuantizableLinear:
        return "nn.MultiheadAttention takes its weight past it"
    base = next(kind for kind in type(module).__mro__ if kind.__module__.startswith("torch.nn.modules."))
    return f"its class has a {what_it_adds(module, base)} of its own"
