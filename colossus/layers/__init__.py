"""Drop-in layers. Each is written once; the tensor mode of the current context determines its sharding."""

from typing import TYPE_CHECKING

from colossus._lazy import lazy_names

if TYPE_CHECKING:
    from colossus.layers.attention import Attention as Attention
    from colossus.layers.batch_norm import BatchNorm1d as BatchNorm1d
    from colossus.layers.batch_norm import BatchNorm2d as BatchNorm2d
    from colossus.layers.batch_norm import BatchNorm3d as BatchNorm3d
    from colossus.layers.batch_norm import SyncBatchNorm as SyncBatchNorm
    from colossus.layers.block import MLP as MLP
    from colossus.layers.block import GatedMLP as GatedMLP
    from colossus.layers.block import TransformerBlock as TransformerBlock
    from colossus.layers.checkpointing import checkpoint as checkpoint
    from colossus.layers.checkpointing import recompute as recompute
    from colossus.layers.distillation import distillation_loss as distillation_loss
    from colossus.layers.dropout import Dropout as Dropout
    from colossus.layers.embedding import Embedding as Embedding
    from colossus.layers.embedding import PositionEmbedding as PositionEmbedding
    from colossus.layers.gated_delta_net import GatedDeltaNet as GatedDeltaNet
    from colossus.layers.heads import merge_heads as merge_heads
    from colossus.layers.heads import split_heads as split_heads
    from colossus.layers.latent_attention import LatentAttention as LatentAttention
    from colossus.layers.linear import Linear as Linear
    from colossus.layers.lm_head import Classifier as Classifier
    from colossus.layers.lm_head import LMHead as LMHead
    from colossus.layers.lora import LoRALinear as LoRALinear
    from colossus.layers.loss import accuracy as accuracy
    from colossus.layers.loss import chunked_cross_entropy as chunked_cross_entropy
    from colossus.layers.loss import cross_entropy as cross_entropy
    from colossus.layers.model_parallel import to_residual as to_residual
    from colossus.layers.moe import MoE as MoE
    from colossus.layers.norm import LayerNorm as LayerNorm
    from colossus.layers.norm import RMSNorm as RMSNorm
    from colossus.layers.norm import ZeroCenteredRMSNorm as ZeroCenteredRMSNorm
    from colossus.layers.patch import ClassToken as ClassToken
    from colossus.layers.patch import PatchEmbedding as PatchEmbedding
    from colossus.layers.pipeline_block import PipelineBlock as PipelineBlock
    from colossus.layers.pipeline_block import run_blocks as run_blocks
    from colossus.layers.preference import dpo_loss as dpo_loss
    from colossus.layers.preference import group_advantages as group_advantages
    from colossus.layers.preference import policy_loss as policy_loss
    from colossus.layers.preference import token_log_probs as token_log_probs
    from colossus.layers.samples import gather_samples as gather_samples
    from colossus.layers.samples import mean_over_samples as mean_over_samples
    from colossus.sequence_parallel.mask import Mask as Mask
    from colossus.sharded_tensor.regions import local as local
    from colossus.sharded_tensor.regions import to_whole as to_whole
    from colossus.sharded_tensor.tensor import ShardedTensor as ShardedTensor
    from colossus.sparse.embedding_bag import EmbeddingBag as EmbeddingBag
    from colossus.sparse.sampled_softmax import SampledSoftmax as SampledSoftmax

#: module -> the names that come from it
_MODULES = {
    "attention": ("Attention",),
    "gated_delta_net": ("GatedDeltaNet",),
    "batch_norm": ("BatchNorm1d", "BatchNorm2d", "BatchNorm3d", "SyncBatchNorm"),
    "block": ("MLP", "GatedMLP", "TransformerBlock"),
    "checkpointing": ("checkpoint", "recompute"),
    "distillation": ("distillation_loss",),
    "dropout": ("Dropout",),
    "embedding": ("Embedding", "PositionEmbedding"),
    "heads": ("merge_heads", "split_heads"),
    "latent_attention": ("LatentAttention",),
    "linear": ("Linear",),
    "lm_head": ("Classifier", "LMHead"),
    "lora": ("LoRALinear",),
    "loss": ("accuracy", "chunked_cross_entropy", "cross_entropy"),
    "model_parallel": ("to_residual",),
    "moe": ("MoE",),
    "norm": ("LayerNorm", "RMSNorm", "ZeroCenteredRMSNorm"),
    "patch": ("ClassToken", "PatchEmbedding"),
    "pipeline_block": ("PipelineBlock", "run_blocks"),
    "preference": ("dpo_loss", "group_advantages", "policy_loss", "token_log_probs"),
    "samples": ("gather_samples", "mean_over_samples"),
    ".sequence_parallel.mask": ("Mask",),
    ".sharded_tensor.regions": ("local", "to_whole"),
    ".sharded_tensor.tensor": ("ShardedTensor",),
    ".sparse.embedding_bag": ("EmbeddingBag",),
    ".sparse.sampled_softmax": ("SampledSoftmax",),
}
_NAMES = {name: module for module, names in _MODULES.items() for name in names}

__all__ = list(_NAMES)
__getattr__, __dir__ = lazy_names(__name__, _NAMES)
