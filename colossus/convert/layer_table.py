"""The table that pairs each layer of ours with its module of torch, for both directions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from colossus.layers.batch_norm import BatchNorm1d, BatchNorm2d, BatchNorm3d, SyncBatchNorm
from colossus.layers.dropout import Dropout
from colossus.layers.embedding import Embedding, PositionEmbedding
from colossus.layers.layer import Layer
from colossus.layers.linear import Linear
from colossus.layers.lm_head import Classifier, LMHead
from colossus.layers.moe import Experts
from colossus.layers.norm import LayerNorm, RMSNorm
from colossus.layers.patch import ClassToken, PatchEmbedding
from colossus.layers.routed_experts import RoutedExperts
from colossus.layers.router import Router
from colossus.sparse.embedding_bag import EmbeddingBag
from colossus.sparse.sampled_softmax import SampledSoftmax
from colossus.torch_versions import batch_norm_has_bias


@dataclass(frozen=True)
class Row:
    """A layer with parameters or rates of its own, and the module of torch that computes the same.

    Both keep the arguments of their constructors as attributes, so that the arguments of one are read from the other.

    Attributes:
        ours: the class of the layer.
        torch: the module with the same parameters, by the same names and shapes; None where torch has none.
        arguments: arguments of our constructor, each an attribute of the same name.
        present: argument of a constructor -> the parameter that exists where it is True.
        renamed: our name of an argument -> torch's, where they differ.
        omitted: our arguments that torch's constructor does not get. A table that is ``sparse`` here has dense
            gradients in torch: any optimizer takes them, and torch has no others for bags with ``mode="max"``.
    """

    ours: type[Layer]
    torch: type[nn.Module] | None
    arguments: tuple[str, ...]
    present: Mapping[str, str] = field(default_factory=dict)
    renamed: Mapping[str, str] = field(default_factory=dict)
    omitted: tuple[str, ...] = ()

    def our_arguments(self, layer: nn.Module, has: Callable[[str], bool]) -> dict[str, Any]:
        """Return the arguments of our constructor for a layer like this.

        Args:
            has: returns whether the whole model, with all stages of a pipeline, has this parameter of the layer.
        """
        arguments = {name: getattr(layer, name) for name in self.arguments}
        return arguments | {name: has(parameter) for name, parameter in self.present.items()}

    def torch_arguments(self, layer: nn.Module, has: Callable[[str], bool]) -> dict[str, Any]:
        """Return the arguments of torch's constructor for a module that computes what the layer does."""
        arguments = self.our_arguments(layer, has)
        return {self.renamed.get(name, name): value for name, value in arguments.items() if name not in self.omitted}

    def arguments_of_torch(self, module: nn.Module) -> dict[str, Any]:
        """Return the arguments of our constructor for a layer that computes what a module of torch does."""
        arguments = {name: getattr(module, self.renamed.get(name, name)) for name in self.arguments}
        if "num_embeddings" in arguments:  # a constructor may have cut or grown the weight alone
            arguments["num_embeddings"], arguments["embedding_dim"] = module._parameters["weight"].shape  # type: ignore[union-attr]
        return arguments | {name: module._parameters.get(leaf) is not None for name, leaf in self.present.items()}


_BIAS = {"bias": "bias"}
_ROUTER = ("score", "norm_topk", "scale", "groups", "top_groups", "bias_update", "aux_loss", "z_loss")
_TABLE = ("num_embeddings", "embedding_dim", "padding_idx", "sparse")
_BATCH_NORM = ("num_features", "eps", "momentum", "track_running_stats"), {"affine": "weight", "bias": "bias"}
_OMITTED = () if batch_norm_has_bias else ("bias",)
_HEAD = {"hidden_size": "in_features", "vocab_size": "out_features"}
#: a module of torch is replaced by the layer of its first row
ROWS = (
    Row(Linear, nn.Linear, ("in_features", "out_features"), _BIAS),
    Row(LMHead, nn.Linear, ("hidden_size", "vocab_size"), _BIAS, _HEAD),
    Row(Classifier, nn.Linear, ("hidden_size", "vocab_size"), _BIAS, _HEAD),
    Row(Embedding, nn.Embedding, _TABLE, omitted=("sparse",)),
    Row(EmbeddingBag, nn.EmbeddingBag, (*_TABLE, "mode"), omitted=("sparse",)),
    Row(LayerNorm, nn.LayerNorm, ("normalized_shape", "eps"), {"elementwise_affine": "weight", "bias": "bias"}),
    Row(RMSNorm, nn.RMSNorm, ("normalized_shape", "eps"), {"elementwise_affine": "weight"}),
    Row(BatchNorm1d, nn.BatchNorm1d, *_BATCH_NORM, omitted=_OMITTED),
    Row(BatchNorm2d, nn.BatchNorm2d, *_BATCH_NORM, omitted=_OMITTED),
    Row(BatchNorm3d, nn.BatchNorm3d, *_BATCH_NORM, omitted=_OMITTED),
    Row(SyncBatchNorm, nn.SyncBatchNorm, *_BATCH_NORM, omitted=_OMITTED),
    Row(Dropout, nn.Dropout, ("p",)),
    Row(RoutedExperts, None, ("hidden_size", "ffn_size", "num_experts", "transposed"), {"bias": "down_proj_bias"}),
    Row(PatchEmbedding, None, ("in_channels", "hidden_size", "patch_size"), _BIAS),
    Row(Experts, None, ("hidden_size", "ffn_size", "num_experts", "limit", "alpha"), {"bias": "gate_bias"}),
    Row(Router, None, ("hidden_size", "num_experts", "top_k", *_ROUTER), {"logit_bias": "logit_bias"}),
    Row(PositionEmbedding, None, ("num_positions", "embedding_dim")),
    Row(ClassToken, None, ("hidden_size",)),
    Row(SampledSoftmax, None, ("hidden_size", "num_classes", "num_samples", "sparse", "ignore_index"), _BIAS),
)
ROW_OF: dict[type, Row] = {row.ours: row for row in ROWS}


def row_of(module: nn.Module) -> Row | None:
    """Return the row of a layer of ours, or of a class derived from one; None for any other module."""
    return next((ROW_OF[kind] for kind in type(module).__mro__ if kind in ROW_OF), None)
