"""The common base of the transformers: their blocks, and calls of a user's module in place of one of ours."""

from __future__ import annotations

import math
from abc import abstractmethod
from functools import partial
from typing import Any, Generic, TypeVar

from torch import Tensor, nn

from colossus.construct.initial_values import Constant, Normal
from colossus.context.parallel_context import current_context
from colossus.layers.block import TransformerBlock, make_norm
from colossus.layers.model_parallel import model_parallel_of
from colossus.layers.pipeline_block import PipelineBlock, run_blocks
from colossus.models.options import TransformerOptions

Options = TypeVar("Options", bound=TransformerOptions)

#: standard deviation of initial weights (GPT-2, ViT as Hugging Face trains it)
INIT = Normal(0.02)


class Transformer(nn.Module, Generic[Options]):
    """A chain of embedding, pre-norm transformer blocks, and head.

    Weights start normal with standard deviation 0.02, those that write to the residual stream with 0.02 / sqrt(2 L)
    (GPT-2).
    """

    #: a cache can continue the model: only `Attention` mixes tokens, and no other layer counts positions
    key_value_cache = True
    blocks: nn.ModuleList

    def __init__(self, options: Options) -> None:
        super().__init__()
        self.options = options
        self.parallel = model_parallel_of(current_context())

    def make_blocks(self) -> nn.ModuleList:
        """Return the transformer blocks."""
        return nn.ModuleList(map(self.make_block, range(self.options.num_layers)))

    def make_block(self, layer: int) -> TransformerBlock:
        """Return the transformer block of a layer, from 0."""
        o = self.options
        return TransformerBlock(
            o.hidden_size,
            o.num_heads,
            o.num_kv_heads,
            o.ffn_hidden_size,
            bias=o.bias,
            norm=o.norm,
            norm_eps=o.norm_eps,
            mlp=o.mlp,
            dropout=o.dropout,
            attention_dropout=o.attention_dropout,
            activation_checkpoint=o.activation_checkpoint,
            init=INIT,
            out_init=Normal(0.02 / math.sqrt(2 * o.num_layers)),
            bias_init=Constant(0.0),
            **o.block_options(layer),
        )

    def make_norm(self) -> nn.Module:
        """Return a norm like the one behind the blocks."""
        o = self.options
        return make_norm(o.norm, o.hidden_size, o.bias, o.norm_eps)

    def forward(self, inputs: Any) -> Tensor:
        logits: Tensor = run_blocks(self.pipeline_blocks(), inputs)
        return logits

    @abstractmethod
    def pipeline_blocks(self) -> list[PipelineBlock | nn.Module]:
        """Return the model as a chain: embedding, transformer blocks, head."""

    @abstractmethod
    def example_batch(self) -> dict[str, Tensor]:
        """Return one sample as a batch of inputs and labels, on the meta device, with the operations of any batch."""

    @abstractmethod
    def run_block(self, block: nn.Module, hidden: Any) -> Any:
        """Run one block on the output of the link before it."""

    def block_calls(self) -> list[PipelineBlock]:
        """Return the transformer blocks as links of the chain."""
        return [PipelineBlock(partial(self.run_block, block), block) for block in self.blocks]
