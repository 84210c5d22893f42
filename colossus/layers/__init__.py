"""Drop-in layers. Each is written once; the tensor mode of the current context says how it is sharded."""

from typing import TYPE_CHECKING

from colossus._lazy import lazy_names

_NAMES = {
    "Attention": "attention",
    "ClassToken": "class_token",
    "Classifier": "lm_head",
    "Dropout": "dropout",
    "Embedding": "embedding",
    "EmbeddingBag": ".sparse.embedding_bag",
    "GatedMLP": "mlp",
    "LMHead": "lm_head",
    "LayerNorm": "norm",
    "Linear": "linear",
    "LoRALinear": "lora",
    "MLP": "mlp",
    "PatchEmbedding": "patch",
    "PipelineBlock": "pipeline_block",
    "PositionEmbedding": "embedding",
    "RMSNorm": "norm",
    "SampledSoftmax": ".sparse.sampled_softmax",
    "ShardedTensor": ".sharded_tensor.tensor",
    "TransformerBlock": "block",
    "accuracy": "loss.accuracy",
    "checkpoint": "recomputation",
    "cross_entropy": "loss.cross_entropy",
    "local": ".sharded_tensor.regions",
    "merge_heads": "attention_heads",
    "recompute": "recomputation",
    "run_blocks": "pipeline_block",
    "split_heads": "attention_heads",
    "to_residual": "model_parallel",
    "to_whole": ".sharded_tensor.regions",
}

if TYPE_CHECKING:
    from colossus.layers.attention import Attention
    from colossus.layers.attention_heads import merge_heads, split_heads
    from colossus.layers.block import TransformerBlock
    from colossus.layers.class_token import ClassToken
    from colossus.layers.dropout import Dropout
    from colossus.layers.embedding import Embedding, PositionEmbedding
    from colossus.layers.linear import Linear
    from colossus.layers.lm_head import Classifier, LMHead
    from colossus.layers.lora import LoRALinear
    from colossus.layers.loss.accuracy import accuracy
    from colossus.layers.loss.cross_entropy import cross_entropy
    from colossus.layers.mlp import MLP, GatedMLP
    from colossus.layers.model_parallel import to_residual
    from colossus.layers.norm import LayerNorm, RMSNorm
    from colossus.layers.patch import PatchEmbedding
    from colossus.layers.pipeline_block import PipelineBlock, run_blocks
    from colossus.layers.recomputation import checkpoint, recompute
    from colossus.sharded_tensor.regions import local, to_whole
    from colossus.sharded_tensor.tensor import ShardedTensor
    from colossus.sparse.embedding_bag import EmbeddingBag
    from colossus.sparse.sampled_softmax import SampledSoftmax

__all__ = [
    "MLP",
    "Attention",
    "ClassToken",
    "Classifier",
    "Dropout",
    "Embedding",
    "EmbeddingBag",
    "GatedMLP",
    "LMHead",
    "LayerNorm",
    "Linear",
    "LoRALinear",
    "PatchEmbedding",
    "PipelineBlock",
    "PositionEmbedding",
    "RMSNorm",
    "SampledSoftmax",
    "ShardedTensor",
    "TransformerBlock",
    "accuracy",
    "checkpoint",
    "cross_entropy",
    "local",
    "merge_heads",
    "recompute",
    "run_blocks",
    "split_heads",
    "to_residual",
    "to_whole",
]

__getattr__, __dir__ = lazy_names(__name__, _NAMES)
