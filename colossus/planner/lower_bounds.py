"""What a plan takes at least, before its layout is profiled: seconds of a step, and memory. No torch.

Only what is certain counts: the products of transformer blocks at the best rate of the device, what tensor parallelism
moves, the wait at the ends of a pipeline; weights, gradients and Adam's state, and the inputs of products. Whatever may
run beside something else does. Of a model whose sizes are not known both bounds are 0.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from colossus.comm.accounting import COLLECTIVES
from colossus.config import Config, model_options
from colossus.config.plans import world_size
from colossus.context.grid import build_grid
from colossus.hardware.data_sheets import FromDataSheet
from colossus.hardware.hardware import Hardware
from colossus.hardware.host_placement import Placement
from colossus.hardware.named_hardware import default_hosts
from colossus.layout.layout import Layout
from colossus.layout.moves import moves
from colossus.models.options import DecoderOptions, TransformerOptions, shardings_of
from colossus.tensor_parallel.attention_heads import are_replicated
from colossus.tensor_parallel.mode import AxisSizes

WIDTHS = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}
#: optimizers with two numbers for each parameter
_TWO_STATES = ("Adam", "AdamW", "NAdam", "RAdam")
#: a move over n ranks leaves a rank n to this power times as many elements
_GROWTH = {"gather": 1, "pad": 1, "reduce_scatter": -1, "slice": -1}


@dataclass(frozen=True)
class Sizes:
    """Of a transformer, torch-free.

    Attributes:
        linears: of a block with an MLP: in features, outputs by name, "column" or "row".
        dense: layers with an MLP; the others have experts.
        attention: elements of the weights of an attention.
        mlp: of an MLP.
        experts: of all experts of a layer.
        head: of the output layer, 0 of a model without one over a vocabulary.
        embedding: of a table that is not that of the head.
    """

    options: TransformerOptions
    linears: tuple[tuple[str, int, Mapping[str, int]], ...]
    dense: int
    attention: int
    mlp: int
    experts: int
    head: int
    embedding: int

    @classmethod
    def of(cls, options: Any) -> Sizes | None:
        """None of a model whose sizes are not known here."""
        if not isinstance(options, TransformerOptions) or not getattr(options, "generates", True):
            return None
        o, experts = options, getattr(options, "experts", None)
        wide, kv, inner = o.ffn_hidden_size, o.num_kv_heads * o.head_dim, o.num_heads * o.head_dim
        up = {"gate": wide, "value": wide} if o.mlp == "swiglu" else {"": wide}
        linears = (
            ("column", o.hidden_size, {"query": inner, "key": kv, "value": kv}),
            ("row", inner, {"": o.hidden_size}),
            ("column", o.hidden_size, up),
            ("row", wide, {"": o.hidden_size}),
        )
        attention, mlp = (sum(n * sum(outs.values()) for _, n, outs in part) for part in (linears[:2], linears[2:]))
        table = o.hidden_size * o.vocab_size if isinstance(o, DecoderOptions) else 0
        is_tied = isinstance(o, DecoderOptions) and o.tie_embeddings
        return cls(
            o, linears,
            dense=sum(experts is None or not experts.is_in(layer) for layer in range(o.num_layers)),
            attention=attention, mlp=mlp,
            experts=0 if experts is None else 3 * experts.num * o.hidden_size * (experts.ffn_size or 0),
            head=table, embedding=0 if is_tied else table,
        )  # fmt: skip

    @property
    def tokens(self) -> int:
        """Of a sample."""
        o: Any = self.options
        return o.seq_len if isinstance(o, DecoderOptions) else o.num_tokens

    @property
    def active(self) -> float:
        """Elements of the weights of blocks that a token is multiplied by; of experts that drop tokens, none."""
        o, experts = self.options, getattr(self.options, "experts", None)
        chosen = 0.0 if experts is None or experts.capacity is not None else self.experts * experts.top_k / experts.num
        return o.num_layers * self.attention + self.dense * self.mlp + (o.num_layers - self.dense) * chosen

    @property
    def again(self) -> float:
        """Of `active`, what full checkpointing multiplies again: all but the last product of each block."""
        o, dense = self.options, self.dense
        last = o.hidden_size * o.ffn_hidden_size
        experts = self.active - o.num_layers * self.attention - dense * self.mlp
        return self.active - dense * last - experts / 3

    @property
    def stored(self) -> tuple[int, int]:
        """Elements of all weights of blocks and head but experts, and of experts."""
        layers = self.options.num_layers
        return layers * self.attention + self.dense * self.mlp + self.head, (layers - self.dense) * self.experts


class LowerBounds:
    """Of the plans of one model on one kind of device.

    Args:
        config: whose plan counts for nothing.
        hosts: over which the devices are spread.
    """

    def __init__(self, config: Config, hardware: Hardware, *, hosts: int = 1) -> None:
        self._config, self._hardware, self._hosts = config, hardware, hosts
        self.sizes = Sizes.of(model_options(config))
        self._moved: dict[Any, float] = {}

    def seconds(self, config: Config) -> float:
        """Of a step of a resolved config; never more than the estimate says."""
        if self.sizes is None:
            return 0.0
        moved, layers = self._moving(config), self.sizes.options.num_layers
        return max(self._computing(config), moved * layers / config.parallel.pipeline.size)

    def likely(self, config: Config) -> float:
        """As if nothing of what `seconds` counts ran beside something else: by this layouts are put in order."""
        if self.sizes is None:
            return 0.0
        layers = self.sizes.options.num_layers / config.parallel.pipeline.size
        return self._computing(config) + (self._moving(config) + self._passing(config)) * layers

    def _passing(self, config: Config) -> float:
        """What sequence parallelism moves for the attention of a layer in a step, in forward and backward."""
        assert self.sizes is not None
        parallel, count = config.parallel, config.schedule.microbatches
        ranks, options, ulysses = parallel.sequence.size, self.sizes.options, parallel.sequence.mode == "ulysses"
        if ranks == 1:
            return 0.0
        samples = config.train.global_batch_size / (parallel.data or 1)
        heads = options.num_kv_heads + (options.num_heads if ulysses else 0)
        held = samples / count * self.sizes.tokens / ranks * 2 * heads * options.head_dim / parallel.tensor.size
        operation, times = ("all_to_all", 2) if ulysses else ("all_gather", 3)  # round a ring: backward passes twice
        width, placement = WIDTHS[config.train.precision.compute], Placement(build_grid(parallel), self._hosts)
        return times * count * placement.seconds(self._hardware, operation, "sequence", held * width)

    def memory(self, config: Config) -> float:
        """Bytes of the fullest rank of a resolved config; never more than the estimate says."""
        if self.sizes is None:
            return 0.0
        stored, gradients = _stored(self.sizes, config)
        activations = _activations(self.sizes, config)
        return stored + (max(activations, gradients) if config.schedule.microbatches == 1 else activations + gradients)

    # -- seconds --------------------------------------------------------------------------------------------

    @cached_property
    def _rate(self) -> float:
        """The most operations per second of products."""
        dtype = self._config.train.precision.compute
        found = []
        for a, b in itertools.combinations_with_replacement([2**power for power in range(4, 15)], 2):
            found.append(2 * a * b * b / self._hardware.matmul_seconds(a, b, b, dtype))
        return max(found)

    def _computing(self, config: Config) -> float:
        """Of the products of all microbatches, and of a pipeline that waits at its ends.

        A stage s of 1F1B begins after the forward of the stages before it, whose backwards follow its own: with t_s
        for both of a microbatch, a step takes at least t_0 + .. + t_(s-1) + m t_s. Of all ways to share T = t_0 + ..
        + t_(p-1) the one whose largest such sum M is smallest has all of them equal: t_s = M / m (1 - 1/m)^s, so that
        M = T / (1 - (1 - 1/m)^p). In any schedule one microbatch goes through all stages.
        """
        assert self.sizes is not None
        parallel, count, stages = config.parallel, config.schedule.microbatches, config.parallel.pipeline.size
        samples = config.train.global_batch_size / (parallel.data or 1) / count
        tokens = samples * self.sizes.tokens / (parallel.tensor.size * parallel.sequence.size)
        again = config.train.activation_checkpoint
        products = (self.sizes.active + self.sizes.head) * (1 if config.optimizer.groups else 3)  # some may be frozen
        if again.type == "full" and again.modules is None:
            layers = self.sizes.options.num_layers
            products += self.sizes.again * (layers // again.every) / layers
        each = 2 * tokens * products / self._rate
        if stages == 1:
            return each * count
        if config.schedule.type == "1f1b":
            return each / (1 - (1 - 1 / count) ** stages)
        return each * max(count / stages, 2 / 3)  # the gradients of weights may follow

    def _moving(self, config: Config) -> float:
        """What tensor parallelism moves for a layer in a step, of the axes that take longest."""
        parallel, tensor = config.parallel, config.parallel.tensor
        if tensor.size == 1:
            return 0.0
        count = config.schedule.microbatches
        samples = config.train.global_batch_size // (parallel.data or 1) // count
        key = (tensor, parallel.sequence.size, parallel.data, parallel.pipeline.size, count)
        if key not in self._moved:
            placement = Placement(build_grid(parallel), self._hosts)
            self._moved[key] = self._moved_by_microbatch(config, samples, placement)
        return self._moved[key] * count

    def _moved_by_microbatch(self, config: Config, samples: int, placement: Placement) -> float:
        """Seconds of a layer with an MLP, of the axes that take longest."""
        assert self.sizes is not None
        tensor, count = config.parallel.tensor, config.schedule.microbatches
        shardings = shardings_of(tensor)
        assert shardings is not None
        width = WIDTHS[config.train.precision.compute]
        rows = samples * self.sizes.tokens // config.parallel.sequence.size
        by_axes: dict[tuple[str, ...], float] = defaultdict(float)
        linears = self.sizes.linears if self.sizes.dense == self.sizes.options.num_layers else self.sizes.linears[:2]
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
                for axes, operation, held in _collectives(before, after, elements, shardings.sizes, again=is_again):
                    by_axes[axes] += times * placement.seconds(self._hardware, operation, axes, held * width)
        return max(by_axes.values(), default=0.0)


def least_seconds(config: Config) -> Callable[[Config], float]:
    """What orders plans of a config where no device is named: seconds of a step on H100s at least, to three digits."""
    hardware = FromDataSheet("h100")

    def of_plan(plan: Config) -> float:
        bounds = LowerBounds(config, hardware, hosts=default_hosts(hardware, world_size(plan.parallel)))
        return float(f"{bounds.seconds(plan):.3g}")

    return of_plan


def _collectives(
    source: Layout, target: Layout, elements: int, sizes: AxisSizes, *, again: bool
) -> Iterator[tuple[tuple[str, ...], str, float]]:
    """Axes, operation and elements held of what takes a tensor to another layout, and its gradient back.

    Args:
        again: what is done in forward is done again in backward.
    """
    local = elements / math.prod(source.num_shards(sizes))
    for move in moves(source, target):
        after = local * float(math.prod(sizes[axis] for axis in move.axes)) ** _GROWTH.get(move.forward, 0)
        for operation, held in ((move.forward, local), (move.backward, after), *([(move.forward, local)] * again)):
            if operation in COLLECTIVES:
                yield move.axes, COLLECTIVES[operation], held
        local = after


# -- memory ---------------------------------------------------------------------------------------------------


def _stored(sizes: Sizes, config: Config) -> tuple[float, float]:
    """Weights and the state of the optimizer, and gradients, of a mean rank of the pipeline."""
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
    if not zero.stage:
        return elements * (params + states), elements * gradients
    whole = min(params, compute) if zero.stage < 3 else min(params, compute) / ranks * (not zero.offload)
    return elements * (whole + (0 if zero.offload else states / ranks)), elements * gradients / ranks


def _activations(sizes: Sizes, config: Config) -> float:
    """What blocks keep of one microbatch, on a mean rank of the pipeline; those of the only microbatch go as gradients
    come."""
    parallel, again = config.parallel, config.train.activation_checkpoint
    if again.modules is not None or sizes.options.activation_checkpoint != "none":
        return 0.0
    o = sizes.options
    samples = config.train.global_batch_size / (parallel.data or 1) / config.schedule.microbatches
    tokens = samples * sizes.tokens / (parallel.sequence.size * parallel.tensor.size * parallel.pipeline.size)
    kept = o.num_layers * o.hidden_size  # the inputs of blocks
    if again.type != "full":  # of its products: the inputs, or by selective checkpointing the outputs
        kept += o.num_layers * o.num_heads * o.head_dim + sizes.dense * o.ffn_hidden_size
    return kept * tokens * WIDTHS[config.train.precision.compute]
