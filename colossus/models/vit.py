"""The vision transformer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from colossus.arithmetic import round_up
from colossus.construct.initial_values import Constant
from colossus.error_place import located_error
from colossus.layers.dropout import Dropout
from colossus.layers.embedding import PositionEmbedding
from colossus.layers.layer import call, is_ours
from colossus.layers.lm_head import Classifier
from colossus.layers.loss import accuracy, cross_entropy
from colossus.layers.patch import ClassToken, PatchEmbedding
from colossus.layers.pipeline_block import PipelineBlock
from colossus.layout.activation import Activation
from colossus.models.transformer import INIT, Transformer
from colossus.models.vit_options import ViTOptions
from colossus.registry import MODELS
from colossus.sharded_tensor.regions import moved, to_whole


@MODELS.register("ViT")
class ViT(Transformer[ViTOptions]):
    """Vision transformer (2010.11929): patches, a class token, pre-norm blocks, and a classifier of the normed token.

    `ViTOptions` has its options; with ``norm_eps=1e-12`` it is Hugging Face's ViTForImageClassification.

    Shape:
        images [batch, in_channels, height, width] in the whole layout. Logits [batch, num_classes], under tensor
        parallelism sharded by its mode (``colossus.layers.to_whole`` makes them whole).

    Where tensor ranks split the tokens between blocks (``parallel.tensor.sequence_sharded``), padding tokens behind the
    image's make their number divide. No token attends to the padding, the output ignores it, and it has no gradient.
    """

    def __init__(self, **options: Any) -> None:
        o = ViTOptions(**options)
        super().__init__(o)
        self.patches = PatchEmbedding(
            o.in_channels, o.hidden_size, o.patch_size, return_layout=self._whole_tokens, bias_init=Constant(0.0)
        )
        self.class_token = ClassToken(o.hidden_size, init=INIT) if o.pool == "token" else None
        self.positions = PositionEmbedding(o.num_tokens, o.hidden_size, init=INIT)
        self.dropout = Dropout(o.dropout)
        self.blocks = self.make_blocks()
        self.norm = self.make_norm()
        self.head = Classifier(o.hidden_size, o.num_classes, init=INIT, bias_init=Constant(0.0))

    def pipeline_blocks(self) -> list[PipelineBlock | nn.Module]:
        embedding = self.patches, self.class_token, self.positions, self.dropout
        return [
            PipelineBlock(self._embed, *embedding, name="patches"),
            *self.block_calls(),
            PipelineBlock(self._logits, self.norm, self.head, name="head"),
        ]

    def example_batch(self) -> dict[str, Tensor]:
        images = torch.zeros(1, *self.options.image_shape, device="meta")
        return {"inputs": images, "labels": torch.zeros(1, dtype=torch.long, device="meta")}

    @property
    def _whole_tokens(self) -> Activation:
        """The layout between blocks, but with all tokens on each rank."""
        return replace(self.parallel.regions.residual, tokens=())

    @property
    def _num_padded(self) -> int:
        """Tokens between blocks on all ranks that split them, padding included."""
        return round_up(self.options.num_tokens, self.parallel.context.size(self.parallel.regions.residual.tokens))

    def _embed(self, images: Tensor) -> Tensor:
        if not isinstance(images, Tensor) or not images.is_floating_point():
            what = images.dtype if isinstance(images, Tensor) else type(images).__name__
            raise located_error(f"ViT: its input is {what}; it takes floating-point images, such as pixels / 255")
        for problem in self.options.check_sample(tuple(images.shape[1:]), None):
            raise located_error(f"ViT: an image of its input, {list(images.shape)}, {problem}")
        x = moved(self.patches(images), self._whole_tokens, self.parallel)
        if self.class_token is not None:
            x = call(self.class_token, x, self.parallel)
        x = call(self.positions, x, self.parallel)
        return self._split_tokens(call(self.dropout, x, self.parallel))

    def _split_tokens(self, x: Tensor) -> Tensor:
        """Return the tokens of an image, padded and moved from every rank to the layout between blocks."""
        missing = self._num_padded - x.shape[1]
        padded = F.pad(x, (0, 0, 0, missing)) if missing else x
        return moved(padded, self.parallel.regions.residual, self.parallel)

    def _without_padding(self, x: Tensor) -> Tensor:
        """Return the inverse of `_split_tokens`."""
        return moved(x, self._whole_tokens, self.parallel)[:, : self.options.num_tokens]

    def without_padding(self, x: Tensor) -> Tensor:
        """Return a block's output in the whole layout, without the padding tokens."""
        is_padded = x.dim() == 3 and x.shape[1] == self._num_padded
        return x[:, : self.options.num_tokens] if is_padded else x

    def run_block(self, block: nn.Module, hidden: Tensor) -> Tensor:
        num_tokens, num_padded = self.options.num_tokens, self._num_padded
        if num_tokens == num_padded:
            return call(block, hidden, self.parallel)
        if is_ours(block):
            is_token = torch.arange(num_padded, device=hidden.device) < num_tokens
            return call(block, hidden, self.parallel, mask=is_token.view(1, 1, 1, -1))
        # a user's own block must not see the padding
        return self._split_tokens(call(block, self._without_padding(hidden), self.parallel))

    def _logits(self, hidden: Tensor) -> Tensor:
        pool = self.options.pool
        if pool == "mean":
            hidden = call(self.norm, hidden, self.parallel)
        x = self._without_padding(hidden)
        pooled = x.mean(1) if pool == "mean" else x[:, 0]
        if pool == "token":
            pooled = call(self.norm, pooled, self.parallel)
        logits: Tensor = self.head(pooled if is_ours(self.head) else to_whole(pooled))
        return logits

    def loss(self, logits: Tensor, batch: Any) -> tuple[Tensor, Tensor]:
        """Return (sum, count) over the images of a batch: (images, labels [batch]), or a dict with ``labels``."""
        return cross_entropy(logits, labels_of(batch), label_smoothing=self.options.label_smoothing)

    @property
    def eval_metrics(self) -> dict[str, Callable[[Tensor, Any], tuple[Tensor, Tensor]]]:
        """The metrics of an evaluation beside the loss: the share of images whose label has the highest logit."""
        return {"accuracy": lambda logits, batch: accuracy(logits, labels_of(batch))}


def labels_of(batch: Any) -> Tensor:
    """Return the labels of (images, labels), or of a dict with ``labels``."""
    labels: Tensor = batch["labels"] if isinstance(batch, dict) else batch[1]
    return labels
