"""``train.reproducible = "plan"``: the plans that it supports, and what it sets in them. No torch."""

from __future__ import annotations

from typing import Any

from colossus.config.schema import Config, Parallel

#: strategies that add up gradients as they are
_STRATEGIES = ("all_reduce", "hierarchical", "zero")
#: the most samples of a step, see `colossus.gradients.order_free`
MAX_SAMPLES = 2**12
#: the most tensor ranks: the leaves of a dim of features, see `colossus.tensor_parallel.tiled_products`
MAX_LEAVES = 8


def reproducible_plan(config: Config, parallel: Parallel, options: Any) -> tuple[Config, Parallel, list[str]]:
    """Return the config and its plan with what the mode needs, if it is set, and a line for each thing it refuses.

    Each sample is a microbatch, and under ZeRO 3 parameters stay whole for a step, so that the gradients of its samples
    are added up before they are reduced.

    Args:
        options: options of the model; None if they are unknown.
    """
    if config.train.reproducible is None:
        return config, parallel, []
    samples = max(1, config.train.global_batch_size // (parallel.data or 1))
    schedule = config.schedule.model_copy(update={"microbatches": samples})
    if parallel.zero.stage == 3:
        tensor = parallel.tensor.model_copy(update={"weights": "step"})
        parallel = parallel.model_copy(update={"tensor": tensor})
    config = config.model_copy(update={"schedule": schedule})
    return config, parallel, _problems(config, parallel, options)


def _problems(config: Config, parallel: Parallel, options: Any) -> list[str]:
    """Return a line for each part of a plan whose sums have other bits than one process computes."""
    tensor, train, strategy = parallel.tensor, config.train, parallel.data_strategy
    mode, name, sequence = tensor.mode, strategy["type"], parallel.sequence.size
    chunk = getattr(options, "loss_chunk", None)
    refused = {
        f"parallel.tensor.mode = {mode!r}, which splits samples: set 1d": tensor.size > 1 and mode != "1d",
        "parallel.tensor.sequence_sharded, which splits the sums over a sample's tokens: leave it out": (
            tensor.sequence_sharded
        ),
        f"parallel.tensor.panels = {tensor.panels}: set 1": tensor.panels > 1,
        f"parallel.tensor = {tensor.size}: set 1, 2, 4 or {MAX_LEAVES}": tensor.size not in (1, 2, 4, MAX_LEAVES),
        f"parallel.sequence = {sequence}, which splits the sums over a sample's tokens: set 1": sequence > 1,
        f"parallel.expert = {parallel.expert.size}: set 1": parallel.expert.size > 1,
        f"parallel.strategy = {name!r}: set one of {', '.join(_STRATEGIES)}": name not in _STRATEGIES,
        f"compress = {strategy.get('compress')!r}, which rounds: leave it out": strategy.get("compress") is not None,
        "parallel.zero.offload: leave it out": parallel.zero.offload,
        "train.precision = fp16, whose loss scale depends on overflows: set bf16": train.precision.compute == "fp16",
        "train.samples_interact, since each sample is a microbatch: leave it out": train.samples_interact,
        "train.tokens_per_microbatch, since each sample is a microbatch: leave it out": (
            train.tokens_per_microbatch is not None
        ),
        f"train.global_batch_size = {train.global_batch_size}: set at most {MAX_SAMPLES}": (
            train.global_batch_size > MAX_SAMPLES
        ),
        f"model.loss_chunk = {chunk}, which adds up in another order: set None": chunk is not None,
    }
    return [f"train.reproducible = 'plan' does not support {what}" for what, is_so in refused.items() if is_so]
