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
    name, sequence = strategy["type"], parallel.sequence.size
    refused = {
        f"parallel.tensor.mode = {tensor.mode!r} splits samples and sums of one product; use 1d": tensor.size > 1
        and tensor.mode != "1d",
        "parallel.tensor.sequence_sharded splits the sums over a sample's tokens": tensor.sequence_sharded,
        f"parallel.tensor.panels = {tensor.panels}": tensor.panels > 1,
        f"parallel.tensor = {tensor.size}: use 1, 2, 4 or {MAX_LEAVES}": tensor.size not in (1, 2, 4, MAX_LEAVES),
        f"parallel.sequence = {sequence}, which splits the sums over a sample's tokens": sequence > 1,
        f"parallel.expert = {parallel.expert.size}": parallel.expert.size > 1,
        f"parallel.strategy = {name!r}: use one of {', '.join(_STRATEGIES)}": name not in _STRATEGIES,
        f"parallel.strategy.compress = {strategy.get('compress')!r} rounds": strategy.get("compress") is not None,
        "train.precision = fp16, whose loss scale depends on overflows": train.precision.compute == "fp16",
        "train.samples_interact: each sample is a microbatch": train.samples_interact,
        "train.tokens_per_microbatch: each sample is a microbatch": train.tokens_per_microbatch is not None,
        f"train.global_batch_size = {train.global_batch_size}: use at most {MAX_SAMPLES}": train.global_batch_size
        > MAX_SAMPLES,
        "model.loss_chunk": getattr(options, "loss_chunk", None) is not None,
    }
    return [f"train.reproducible = 'plan' does not support {what}" for what, is_so in refused.items() if is_so]
