"""The seconds and bytes of a plan by closed forms, which order layouts before they are profiled. No torch.

Seconds are the products of transformer blocks at the best rate of the device, the collectives of tensor and sequence
parallelism without overlap, and the wait at the ends of a pipeline. Bytes are those that certainly count (see
`ClosedForm.memory`). Both are 0 for a model whose sizes its options do not tell.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable
from functools import cached_property
from typing import Any

from colossus.comm.accounting import COLLECTIVES
from colossus.config import Config, model_options
from colossus.config.plans import world_size
from colossus.context.grid import build_grid
from colossus.hardware.data_sheets import WIDTHS, FromDataSheet
from colossus.hardware.hardware import Hardware
from colossus.hardware.host_placement import Placement
from colossus.hardware.named_hardware import default_hosts
from colossus.models.options import shardings_of
from colossus.planner.candidates import samples_of
from colossus.planner.transformer_sizes import Sizes
from colossus.tensor_parallel.attention_heads import are_replicated
from colossus.tensor_parallel.traffic import sized_moves

#: optimizers with two states for each parameter
_TWO_STATES = ("Adam", "AdamW", "NAdam", "RAdam")
#: schedules whose first ranks hold as many microbatches as there are stages behind them, or more
_ONE_BY_ONE = ("1f1b", "interleaved", "zb-h1", "zb-v", "gpipe")
#: bytes of a logit and of its gradient
_LOGIT = 8


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
    tokens = samples_of(config) * sizes.tokens / parallel.sequence.size
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


class ClosedForm:
    """Closed forms for the plans of one model on one kind of device.

    Args:
        config: the user's config; its own plan is ignored.
        hardware: speed of devices and links.
        hosts: hosts over which the devices are spread evenly.
    """

    def __init__(self, config: Config, hardware: Hardware, *, hosts: int = 1) -> None:
        self._config, self._hardware, self._hosts = config, hardware, hosts
        self.sizes = Sizes.of(model_options(config))
        self._moved: dict[Any, float] = {}

    def seconds(self, config: Config) -> float:
        """Return the likely seconds of a resolved config's step."""
        if self.sizes is None:
            return 0.0
        layers = self.sizes.options.num_layers / config.parallel.pipeline.size
        return self._computing(config) + (self._moving(config) + self._passing(config)) * layers

    def _passing(self, config: Config) -> float:
        """Return the seconds of sequence parallelism's collectives for the attention of a layer in a step."""
        assert self.sizes is not None
        parallel, count = config.parallel, config.schedule.microbatches
        ranks, options, ulysses = parallel.sequence.size, self.sizes.options, parallel.sequence.mode == "ulysses"
        if ranks == 1:
            return 0.0
        heads = options.num_kv_heads + (options.num_heads if ulysses else 0)
        elements = samples_of(config) * self.sizes.tokens / ranks * 2 * heads * options.head_dim / parallel.tensor.size
        operation, times = ("all_to_all", 2) if ulysses else ("all_gather", 3)  # a ring's backward passes twice as much
        width, placement = WIDTHS[config.train.precision.compute], Placement(build_grid(parallel), self._hosts)
        return times * count * placement.seconds(self._hardware, operation, "sequence", elements * width)

    def memory(self, config: Config) -> float:
        """Return a lower bound of the bytes of the fullest rank of a resolved config.

        It counts weights, gradients and Adam's state on a mean pipeline rank, what blocks save of the microbatches in
        flight, and the larger of what one recomputed block and the logits need.
        """
        if self.sizes is None:
            return 0.0
        stored, gradients = _stored(self.sizes, config)
        saved, passing = _activations(self.sizes, config)
        if config.schedule.microbatches == 1:
            return stored + max(saved + passing, gradients)
        return stored + saved + max(passing, gradients)

    @cached_property
    def _rate(self) -> float:
        """Return the highest FLOP/s of products of any size."""
        dtype = self._config.train.precision.compute
        sizes = [2**power for power in range(4, 15)]
        return max(
            2 * a * b * b / self._hardware.matmul_seconds(a, b, b, dtype)
            for a, b in itertools.combinations_with_replacement(sizes, 2)
        )

    def _computing(self, config: Config) -> float:
        """Return the least seconds of all products of a step, with the wait at the ends of the pipeline.

        Under 1F1B stage s starts after the forwards of the stages before it, and their backwards follow its own. If t_s
        is the time of a microbatch on stage s, a step takes at least t_0 + .. + t_(s-1) + m t_s, for each s. The total
        T = t_0 + .. + t_(p-1) can be split over the stages in many ways. The largest of these sums is smallest, say M,
        if all are equal: then t_s = M / m (1 - 1/m)^s, and M = T / (1 - (1 - 1/m)^p). Under any schedule one microbatch
        goes through all stages.
        """
        assert self.sizes is not None
        parallel, count, stages = config.parallel, config.schedule.microbatches, config.parallel.pipeline.size
        tokens = samples_of(config) * self.sizes.tokens / (parallel.tensor.size * parallel.sequence.size)
        checkpointing = config.train.activation_checkpoint
        products = (self.sizes.active + self.sizes.head) * (1 if config.optimizer.groups else 3)  # some may be frozen
        if checkpointing.type == "full" and checkpointing.modules is None:
            layers = self.sizes.options.num_layers
            products += self.sizes.recomputed * (layers // checkpointing.every) / layers
        microbatch = 2 * tokens * products / self._rate
        if stages == 1:
            return microbatch * count
        if config.schedule.type == "1f1b":
            return microbatch / (1 - (1 - 1 / count) ** stages)
        return microbatch * max(count / stages, 2 / 3)  # wgrads, a third of it, may fill the wait

    def _moving(self, config: Config) -> float:
        """Return the seconds of tensor parallelism's collectives for a layer in a step, along the slowest axes."""
        parallel, tensor = config.parallel, config.parallel.tensor
        if tensor.size == 1:
            return 0.0
        count = config.schedule.microbatches
        key = (tensor, parallel.sequence.size, parallel.data, parallel.pipeline.size, count)
        if key not in self._moved:
            self._moved[key] = self._moved_by_microbatch(config)
        return self._moved[key] * count

    def _moved_by_microbatch(self, config: Config) -> float:
        """Return the same for a microbatch. If some layers have experts, only attention counts."""
        assert self.sizes is not None
        tensor, count = config.parallel.tensor, config.schedule.microbatches
        shardings = shardings_of(tensor)
        assert shardings is not None
        width = WIDTHS[config.train.precision.compute]
        placement = Placement(build_grid(config.parallel), self._hosts)
        rows = samples_of(config) * self.sizes.tokens // config.parallel.sequence.size
        by_axes: dict[tuple[str, ...], float] = defaultdict(float)
        linears = self.sizes.linears if self.sizes.dense == self.sizes.options.num_layers else self.sizes.linears[:-2]
        for split, inside, outputs in linears:
            if are_replicated(self.sizes.options.num_kv_heads, shardings):
                outputs = {name: outputs[name] for name in outputs if name not in ("key", "value")}
            chosen = shardings.choose(split, inside, outputs)
            if isinstance(chosen, list):
                continue
            source, target = shardings.default_layouts(split)
            outside, again = sum(outputs.values()), tensor.weights == "matmul"
            once = 1 / count if tensor.weights == "step" else 1
            routes = [
                (source.at(2), chosen.x.at(2), rows * inside, 1.0, tensor.gathered == "again"),
                (chosen.weight, chosen.gathered_weight, inside * outside, once, again),
                (chosen.y.at(2), target.at(2), rows * outside, 1.0, False),
            ]
            for before, after, elements, times, is_again in routes:
                for move, given, moved in sized_moves(before, after, elements, shardings.sizes):
                    forward, backward = (move.forward, given), (move.backward, moved)
                    for kind, inputs in (forward, backward, *[forward] * is_again):
                        if operation := COLLECTIVES.get(kind):
                            seconds = placement.seconds(self._hardware, operation, move.axes, inputs * width)
                            by_axes[move.axes] += times * seconds
        return max(by_axes.values(), default=0.0)


def least_seconds(config: Config) -> Callable[[Config], float]:
    """Return a key that orders plans if no device is named: the likely seconds of a step on H100s, to three digits."""
    hardware = FromDataSheet("h100")

    def of_plan(plan: Config) -> float:
        form = ClosedForm(config, hardware, hosts=default_hosts(hardware, world_size(plan.parallel)))
        return float(f"{form.seconds(plan):.3g}")

    return of_plan
