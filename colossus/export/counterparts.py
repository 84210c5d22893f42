"""The plain counterpart of each of our layers and models: a torch module of the same names, without values yet."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import nn

from colossus.export import torch_modules as plain
from colossus.layers.attention import Attention
from colossus.layers.block import TransformerBlock
from colossus.layers.checkpointed_forward import is_checkpointed
from colossus.layers.class_token import ClassToken
from colossus.layers.dropout import Dropout
from colossus.layers.embedding import Embedding, PositionEmbedding
from colossus.layers.embedding_bag import EmbeddingBag
from colossus.layers.few_kv_heads import ReplicatedKV
from colossus.layers.linear import Linear
from colossus.layers.lm_head import LMHead
from colossus.layers.lora import LoRALinear
from colossus.layers.loss.sampled_softmax import SampledSoftmax
from colossus.layers.mlp import MLP, GatedMLP, TanhMLP
from colossus.layers.norm import LayerNorm, RMSNorm
from colossus.layers.patch import PatchEmbedding
from colossus.layers.rotary import Rotary
from colossus.models.decoder import Decoder
from colossus.models.vit import ViT
from colossus.models.words import WordsLM

#: what a subclass may define and still compute what it is a subclass of: words, numbers beside the output, and what is
#: looked at as it was made
_HARMLESS = {
    "__init__", "extra_repr", "title", "name_error", "loss", "eval_metrics", "options_class", "make_blocks", "make_norm"
}  # fmt: skip
#: of every class
_OF_CLASSES = {"local_layouts", "own_forward", "is_fused", "num_outputs"}


class Counterparts:
    """Makes counterparts.

    Args:
        names: of all parameters of the whole model: other stages of a pipeline have deleted theirs here.
        convert: gives the plain module in the place of one inside of ours.
    """

    def __init__(self, names: Collection[str], convert: Callable[[nn.Module], nn.Module]) -> None:
        self._names, self._convert = frozenset(names), convert

    def make(self, module: nn.Module, name: str) -> nn.Module | None:
        """The counterpart on the meta device; None of a module that is not ours.

        Raises:
            ValueError: for one of ours that has none, or that computes otherwise than colossus wrote it.
        """
        ours = next((kind for kind in type(module).__mro__ if kind in _MAKERS), None)
        if ours is None:
            if type(module).__module__.partition(".")[0] == "colossus" or _is_derived(module):
                raise ValueError(f"{_title(module, name)} has no plain counterpart: {_HOW}")
            return None
        _require_as_written(module, name, ours)
        with torch.device("meta"):
            made = _MAKERS[ours](self, module, name)
        _require_known_children(module, made, name)
        return made

    # -- layers without others inside ----------------------------------------------------------------------

    def _linear(self, m: Linear, name: str) -> nn.Module:
        if not m.is_fused:
            return nn.Linear(m.in_features, m.out_features, self._has(name, "bias"))
        return plain.FusedLinear(
            {out: nn.Linear(m.in_features, size, self._has(name, out, "bias")) for out, size in m.outputs.items()}
        )

    def _replicated_kv(self, m: ReplicatedKV, name: str) -> nn.Module:
        return plain.FusedLinear(
            {out: nn.Linear(m.in_features, size, self._has(name, out, "bias")) for out, size in m.outputs.items()}
        )

    def _patch_embedding(self, m: PatchEmbedding, name: str) -> nn.Module:
        return plain.PatchEmbedding(m.in_channels, m.hidden_size, m.patch_size, self._has(name, "bias"))

    def _head(self, m: LMHead, name: str) -> nn.Module:
        return nn.Linear(m.hidden_size, m.vocab_size, self._has(name, "bias"))

    def _embedding(self, m: Embedding, name: str) -> nn.Module:
        return nn.Embedding(m.num_embeddings, m.embedding_dim, m.padding_idx)

    def _bag(self, m: EmbeddingBag, name: str) -> nn.Module:
        options: dict[str, Any] = dict(include_last_offset=m.include_last_offset, padding_idx=m.padding_idx)
        return nn.EmbeddingBag(m.num_embeddings, m.embedding_dim, mode=m.mode, **options)

    def _softmax(self, m: SampledSoftmax, name: str) -> nn.Module:
        return plain.SoftmaxLoss(m.hidden_size, m.num_classes, self._has(name, "bias"), m.ignore_index)

    def _positions(self, m: PositionEmbedding, name: str) -> nn.Module:
        return plain.PositionEmbedding(m.num_positions, m.embedding_dim)

    def _class_token(self, m: ClassToken, name: str) -> nn.Module:
        return plain.ClassToken(m.hidden_size)

    def _layer_norm(self, m: LayerNorm, name: str) -> nn.Module:
        affine, bias = self._has(name, "weight"), self._has(name, "bias")
        return nn.LayerNorm(m.normalized_shape, m.eps or 0.0, elementwise_affine=affine, bias=bias)

    def _rms_norm(self, m: RMSNorm, name: str) -> nn.Module:
        return nn.RMSNorm(m.normalized_shape, m.eps, elementwise_affine=self._has(name, "weight"))

    def _dropout(self, m: Dropout, name: str) -> nn.Module:
        return nn.Dropout(m.p)

    def _rotary(self, m: Rotary, name: str) -> nn.Module:
        return plain.Rotary(m.head_dim, m.base, None if m.scaling is None else m.scaling.model_dump())

    # -- layers of layers ----------------------------------------------------------------------------------

    def _lora(self, m: LoRALinear, name: str) -> nn.Module:
        return plain.LoRALinear(self._convert(m.base), self._convert(m.first), self._convert(m.second), m.scale)

    def _attention(self, m: Attention, name: str) -> nn.Module:
        return plain.Attention(
            self._convert(m.qkv),
            self._convert(m.out),
            m.head_dim,
            causal=m.causal,
            dropout=self._convert(m.dropout),
            rotary=None if m.rotary is None else self._convert(m.rotary),
        )

    def _mlp(self, m: MLP, name: str) -> nn.Module:
        return plain.MLP(self._convert(m.up), self._convert(m.down), "tanh" if isinstance(m, TanhMLP) else "none")

    def _gated_mlp(self, m: GatedMLP, name: str) -> nn.Module:
        return plain.GatedMLP(self._convert(m.up), self._convert(m.down))

    def _block(self, m: TransformerBlock, name: str) -> nn.Module:
        parts = m.attention_norm, m.attention, m.mlp_norm, m.mlp, m.attention_dropout, m.mlp_dropout
        return plain.TransformerBlock(*map(self._convert, parts))

    def _decoder(self, m: Decoder, name: str) -> nn.Module:
        return plain.Decoder(
            self._convert(m.embedding),
            None if m.positions is None else self._convert(m.positions),
            self._convert(m.dropout),
            [self._convert(block) for block in m.blocks],
            self._convert(m.norm),
            self._convert(m.head),
        )

    def _words(self, m: WordsLM, name: str) -> nn.Module:
        return plain.WordsLM(
            self._convert(m.embedding),
            None if m.pairs is None else self._convert(m.pairs),
            None if m.positions is None else self._convert(m.positions),
            self._convert(m.dropout),
            [self._convert(block) for block in m.blocks],
            None if m.lstm is None else self._convert(m.lstm),
            self._convert(m.norm),
            self._convert(m.head),
        )

    def _vit(self, m: ViT, name: str) -> nn.Module:
        return plain.ViT(
            self._convert(m.patches),
            None if m.class_token is None else self._convert(m.class_token),
            self._convert(m.positions),
            self._convert(m.dropout),
            [self._convert(block) for block in m.blocks],
            self._convert(m.norm),
            self._convert(m.head),
        )

    def _has(self, *path: str) -> bool:
        return ".".join(filter(None, path)) in self._names


_MAKERS: dict[type, Callable[[Counterparts, Any, str], nn.Module]] = {
    PatchEmbedding: Counterparts._patch_embedding,
    Linear: Counterparts._linear,
    ReplicatedKV: Counterparts._replicated_kv,
    LMHead: Counterparts._head,  # Classifier, too
    Embedding: Counterparts._embedding,
    EmbeddingBag: Counterparts._bag,
    SampledSoftmax: Counterparts._softmax,
    PositionEmbedding: Counterparts._positions,
    ClassToken: Counterparts._class_token,
    LayerNorm: Counterparts._layer_norm,
    RMSNorm: Counterparts._rms_norm,
    Dropout: Counterparts._dropout,
    Rotary: Counterparts._rotary,
    LoRALinear: Counterparts._lora,
    Attention: Counterparts._attention,
    MLP: Counterparts._mlp,
    GatedMLP: Counterparts._gated_mlp,
    TransformerBlock: Counterparts._block,
    Decoder: Counterparts._decoder,
    ViT: Counterparts._vit,
    WordsLM: Counterparts._words,
}

_HOW = (
    "write it with the layers of colossus and torch (a plain nn.Module of yours stays as it is), or load "
    "colossus.checkpoint.full_state_dict into a module of your own"
)


def _title(module: nn.Module, name: str) -> str:
    return f"{name or 'the model'} ({type(module).__name__})"


def _is_derived(module: nn.Module) -> bool:
    """Whether it is of a class made of a layer's base, which is no module of torch's alone."""
    return any(kind.__module__.startswith("colossus.") for kind in type(module).__mro__)


def _require_as_written(module: nn.Module, name: str, ours: type) -> None:
    """That nobody has overridden what this layer computes."""
    kinds = type(module).__mro__
    others = [kind for kind in kinds[: kinds.index(ours)] if kind.__module__.partition(".")[0] != "colossus"]
    known = {key for kind in ours.__mro__ for key in vars(kind)} - _HARMLESS - _OF_CLASSES
    changed = [key for kind in others for key in vars(kind) if key in known and not _is_of_any_class(key)]
    if "forward" in vars(module) and not is_checkpointed(module):
        changed.append("forward")
    if changed:
        raise ValueError(
            f"{_title(module, name)} overrides {', '.join(dict.fromkeys(changed))} of colossus's {ours.__name__}, so "
            f"that its plain counterpart would compute something else: {_HOW}"
        )


def _is_of_any_class(key: str) -> bool:
    return key.startswith("__") and key.endswith("__") and key != "__call__"


def _require_known_children(module: nn.Module, made: nn.Module, name: str) -> None:
    extra = [child for child in module._modules if module._modules[child] is not None and child not in made._modules]
    own = [leaf for leaf in module._parameters if leaf not in ("weight", "bias")] + list(module._buffers)
    if extra or own:
        raise ValueError(
            f"{_title(module, name)} holds {', '.join([*extra, *own])}, which its plain counterpart does not know: "
            f"{_HOW}"
        )
