"""A lower bound of a plan's memory, near enough to tell which layouts fit. No torch."""

from __future__ import annotations

import math

from colossus.config import Config
from colossus.hardware.data_sheets import WIDTHS
from colossus.models.options import shardings_of
from colossus.planner.transformer_sizes import Sizes

#: optimizers with two states for each parameter
_TWO_STATES = ("Adam", "AdamW", "NAdam", "RAdam")
#: schedules whose first ranks hold as many microbatches as there are stages behind them, or more
_ONE_BY_ONE = ("1f1b", "interleaved", "zb-h1", "zb-v", "gpipe")
#: bytes of a logit and of its gradient
_LOGIT = 8


def least_memory(sizes: Sizes, config: Config) -> float:
    """Return a lower bound of the bytes of the fullest rank of a resolved config.

    It counts weights, gradients and Adam's state on a mean pipeline rank, what blocks save of the microbatches in
    flight, and the larger of what one recomputed block and the logits need.
    """
    stored, gradients = _stored(sizes, config)
    saved, passing = _activations(sizes, config)
    if config.schedule.microbatches == 1:
        return stored + max(saved + passing, gradients)
    return stored + saved + max(passing, gradients)


def _stored(sizes: Sizes, config: Config) -> tuple[float, float]:
    """Return the bytes of weights and optimizer state, and of gradients, on a mean pipeline rank."""
    parallel, precision, zero = config.parallel, config.train.precision, config.parallel.zero
    dense, experts = sizes.stored
    elements: float = dense + experts / parallel.expert.size
    if not getattr(sizes.options, "sparse_embeddings", False):
        elements += sizes.embedding
    elements /= parallel.tensor.size * parallel.pipeline.size
    params, compute, optimizer = (WIDTHS[getattr(precision, key)] for key in ("params", "compute", "optimizer"))
    ranks = (zero.shard or parallel.data or 1) * parallel.sequence.size
    has_copy = optimizer != params
    gradients, states = params, (2 * (config.optimizer.type in _TWO_STATES) + has_copy) * optimizer
    if config.optimizer.groups:  # some parameters may be frozen
        gradients, states = 0, 0
    gathered = _gathered_weights(sizes, config)
    if not zero.stage:
        return elements * (params + states) + gathered, elements * gradients
    whole = min(params, compute) if zero.stage < 3 else min(params, compute) / ranks * (not zero.offload)
    return elements * (whole + (0 if zero.offload else states / ranks)) + gathered, elements * gradients / ranks


def _gathered_weights(sizes: Sizes, config: Config) -> float:
    """Return the bytes of the gathered weights of a mean pipeline rank's blocks, if they stay for their backward."""
    parallel, tensor = config.parallel, config.parallel.tensor
    if tensor.weights == "matmul":
        return 0.0
    blocks = sizes.options.num_layers * sizes.attention + sizes.dense * sizes.mlp
    gathered = 0.0
    if parallel.zero.stage == 3:
        gathered += blocks / tensor.size
    if tensor.mode != "1d" and (tensor.weights == "step" or config.train.activation_checkpoint.type != "full"):
        shardings = shardings_of(tensor)
        assert shardings is not None
        chosen = shardings.choose("column", sizes.options.hidden_size, {"": sizes.options.ffn_hidden_size})
        if not isinstance(chosen, list):
            gathered += blocks / math.prod(chosen.gathered_weight.num_shards(shardings.sizes))
    return WIDTHS[config.train.precision.compute] * gathered / parallel.pipeline.size


def _activations(sizes: Sizes, config: Config) -> tuple[float, float]:
    """Return the bytes that a mean pipeline rank saves for backward, and those that it needs on top for a while."""
    parallel, checkpointing, o = config.parallel, config.train.activation_checkpoint, sizes.options
    if checkpointing.modules is not None or checkpointing.every > 1 or o.activation_checkpoint != "none":
        return 0.0, 0.0
    width, tensor = WIDTHS[config.train.precision.compute], parallel.tensor
    count, stages = config.schedule.microbatches, parallel.pipeline.size
    tokens = config.train.global_batch_size / (parallel.data or 1) / count * sizes.tokens / parallel.sequence.size
    #: ranks over which features between blocks are split
    between = 1 if tensor.mode == "1d" and not tensor.sequence_sharded else tensor.size
    heads, keys, wide = o.num_heads * o.head_dim, o.num_kv_heads * o.head_dim, o.ffn_hidden_size
    is_gated, experts = o.mlp == "swiglu", o.num_layers - sizes.dense
    is_wide_norm = o.norm == "rmsnorm" and tensor.mode == "1d" and width == 2  # it keeps fp32 copies
    #: copies that a rotation saves; that of a part of each head, beside latents, is small
    rotated = o.is_rotary and getattr(o, "latent", None) is None
    outer, attention, mlp = {
        "none": (10 if is_wide_norm else 4, (2 + rotated) * (heads + keys), 4 * wide if is_gated else 2 * wide),
        "selective": (2, 2 * (heads + keys), 2 * wide if is_gated else wide),
        "full": (1, 0, 0),
    }[checkpointing.type]
    layer = o.hidden_size * outer / between + (attention + sizes.dense / o.num_layers * mlp) / tensor.size
    in_flight = 1.0
    if config.schedule.type in _ONE_BY_ONE:
        in_flight = sum(min(count, stages - rank) for rank in range(stages)) / stages
    saved = tokens * width * layer * o.num_layers / stages * in_flight
    again = (2 + rotated) * (heads + keys) + (0 if experts else 4 * wide if is_gated else 2 * wide)
    recomputed = tokens * width * again / tensor.size * (checkpointing.type == "full")
    rows = min(tokens, getattr(o, "loss_chunk", None) or tokens)
    logits = rows * _LOGIT * sizes.head / o.hidden_size / tensor.size if stages == 1 else 0.0
    return saved, max(recomputed, logits)
