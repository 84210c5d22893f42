"""Sizes and choices of a transformer, and what follows from them: misfits with a plan, parameters, FLOPs. No torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from colossus.arithmetic import either, nearest_multiples, not_a_multiple
from colossus.layout.activation import Activation
from colossus.layout.layout import Layout
from colossus.registry import MLPS, NORMS, SEQUENCE_MODES, TENSOR_MODES, Registry
from colossus.sequence_parallel.order import length_multiple
from colossus.sequence_parallel.traffic import cheaper
from colossus.tensor_parallel.choice import Shardings
from colossus.tensor_parallel.head_counts import head_problems, indivisible_heads, kv_head_copies, uneven_kv_heads
from colossus.tensor_parallel.mode import MatmulSharding

Count = Annotated[int, Field(ge=1)]
Probability = Annotated[float, Field(ge=0, lt=1)]


def _known(registry: Registry) -> AfterValidator:
    """A name of a registry."""

    def check(name: str) -> str:
        if name not in registry:
            raise ValueError(registry.missing(name))
        return name

    return AfterValidator(check)


@dataclass(frozen=True)
class LinearSpec:
    """A linear of the model, and the options that say how wide it is; empty where another check says more."""

    split: str
    inputs: int
    outputs: dict[str, int]
    in_key: str = "hidden_size"
    out_key: str = "hidden_size"
    padded: bool = False


def _shardings(tensor: Any) -> Shardings | None:
    """The shardings of a ``parallel.tensor`` section; None when its sizes do not fit the mode."""
    mode = TENSOR_MODES.get(tensor.mode)
    try:
        sizes = mode.axis_sizes(tensor.size, tensor.depth, tensor.shape)
    except ValueError:
        return None
    split_tokens = tensor.sequence_sharded and mode.splits_tokens
    return Shardings.of(mode, Activation(), sizes, sequence_sharded=split_tokens, keep=tensor.gathered == "keep")


class TransformerOptions(BaseModel):
    """What every transformer of colossus can be told; a model's own options are a subclass.

    A subclass says what it has beside its blocks: `other_linears`, `other_parameters`, `num_blocks`.

    Attributes:
        block_names: what a pipeline cuts the model into, in words.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)
    block_names: ClassVar[str] = "layers"

    num_layers: Count = 4
    hidden_size: Count = 128
    num_heads: Count = 4
    #: key/value heads (grouped-query attention); default ``num_heads``
    num_kv_heads: Count = Field(default_factory=lambda values: values["num_heads"])
    #: tokens of a sequence
    seq_len: Count = 128
    mlp: Annotated[str, _known(MLPS)] = "gelu"
    ffn_hidden_size: Count = Field(
        default_factory=lambda values: MLPS.get(values["mlp"]).ffn_size(values["hidden_size"])
    )
    norm: Annotated[str, _known(NORMS)] = "layernorm"
    #: of all norms; default 1e-5 for layernorm and 1e-6 for rmsnorm
    norm_eps: Annotated[float, Field(gt=0)] = Field(default_factory=lambda values: NORMS.get(values["norm"]).eps)
    dropout: Probability = 0.0
    attention_dropout: Probability = 0.0
    bias: bool = True
    activation_checkpoint: Literal["none", "full", "selective"] = "none"

    @model_validator(mode="before")
    @classmethod
    def _none_is_default(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        derived = ("num_kv_heads", "ffn_hidden_size", "norm_eps")
        return {key: item for key, item in value.items() if not (key in derived and item is None)}

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def is_rotary(self) -> bool:
        """Whether positions are rotated in attention."""
        return False

    @property
    def num_blocks(self) -> int:
        """Into how many stages a pipeline can cut the model at most."""
        return self.num_layers

    def other_linears(self) -> list[LinearSpec]:
        """Those outside of the blocks."""
        return []

    def other_parameters(self, shardings: Shardings | None) -> int:
        """Elements that a rank holds outside of the blocks."""
        return 0

    def check(self, parallel: Any) -> list[str]:
        """What is wrong with these sizes in any run, and under the ``parallel`` section; one line per problem."""
        return [
            *head_problems(self.hidden_size, self.num_heads, self.num_kv_heads, rotary=self.is_rotary, prefix="model."),
            *self._check_pipeline(parallel),
            *self._check_sequence(parallel),
            *self._check_tensor(parallel.tensor),
        ]

    def _check_pipeline(self, parallel: Any) -> list[str]:
        if parallel.pipeline.size <= self.num_blocks:
            return []
        return [
            f"model.num_layers = {self.num_layers} gives {self.num_blocks} blocks ({self.block_names}), fewer than the "
            f"stages of parallel.pipeline.size = {parallel.pipeline.size}; every stage needs a block"
        ]

    def _check_tensor(self, tensor: Any) -> list[str]:
        """Sizes that the tensor mode does not divide: of each the one line about the most ranks."""
        shardings = _shardings(tensor) if tensor.size > 1 else None
        if shardings is None:
            return []  # sizes that the mode cannot take are refused with the plan
        undivided: dict[str, tuple[int, tuple[str, ...]]] = {}
        of_heads: list[str] = []

        def check(key: str, axes: tuple[str, ...]) -> None:
            ways = shardings.ways(axes)
            if getattr(self, key) % ways and ways > undivided.get(key, (1, ()))[0]:
                undivided[key] = ways, axes

        for linear in (*self.block_linears(shardings), *self.other_linears()):
            chosen = shardings.choose(linear.split, linear.inputs, linear.outputs, padded=linear.padded)
            for misfit in chosen if isinstance(chosen, list) else ():
                key = linear.in_key if misfit.name == "in_features" else linear.out_key
                if key:
                    check(key, misfit.axes)
                else:
                    of_heads = of_heads or [f"model: heads x head size of the attention, {misfit}"]
        for misfit in indivisible_heads(self.num_heads, self.num_kv_heads, shardings):
            check(misfit.name, misfit.axes)
        if tensor.sequence_sharded:
            check("seq_len", shardings.regions.outer.tokens)
        if not undivided:  # else the lines below say the same
            return of_heads
        problems = []
        for key, (ways, axes) in undivided.items():
            value = getattr(self, key)
            by = f"the {ways} ranks of {' x '.join(axes)} (parallel.tensor.mode = {tensor.mode})"
            if ways == tensor.size:
                by = f"parallel.tensor.size = {ways}"
            if key == "num_kv_heads" and value < ways:
                problems.append(uneven_kv_heads(self.num_heads, value, ways, by, prefix="model."))
            else:
                problems.append(not_a_multiple(f"model.{key}", value, by, ways))
        return problems

    def sequence_mode(self, parallel: Any) -> str:
        """Of ring and Ulysses the one that sends fewer bytes for this attention."""
        ways = self._head_ways(parallel)
        heads, kv_heads = max(1, self.num_heads // ways), max(1, self.num_kv_heads // ways)
        return cheaper(self.seq_len, heads, kv_heads, self.head_dim, parallel.sequence.size)

    def _head_ways(self, parallel: Any) -> int:
        """Over how many ranks tensor parallelism splits the heads."""
        shardings = _shardings(parallel.tensor) if parallel.tensor.size > 1 else None
        return shardings.ways(shardings.regions.inner.features) if shardings is not None else 1

    def _check_sequence(self, parallel: Any) -> list[str]:
        sequence = parallel.sequence
        if sequence.size == 1:
            return []
        problems = []
        mode = SEQUENCE_MODES.get(sequence.mode or "ring")
        try:
            sizes = mode.axis_sizes(sequence.size, sequence.ulysses)
        except ValueError:
            return []  # the plan itself is refused for it
        ring, ulysses = (math.prod(sizes[axis] for axis in axes) for axes in (mode.ring, mode.ulysses))
        step = length_multiple(ring, ulysses)
        if self.seq_len % step and not sequence.pad:
            halves = f" (two chunks for each of the {ring} ranks of the ring)" if ring > 1 else ""
            by = f"{step}, into which parallel.sequence.size = {sequence.size} in mode {mode.name} cuts it{halves}"
            problems.append(f"{not_a_multiple('model.seq_len', self.seq_len, by, step)}; or parallel.sequence.pad=True")
        ways = self._head_ways(parallel) * ulysses
        for key, heads in (("num_heads", self.num_heads), ("num_kv_heads", self.num_kv_heads)):
            if heads % ways and ulysses > 1:
                near = either(nearest_multiples(heads, ways))
                tensor = f" x {ways // ulysses} of the tensor mode" if ways > ulysses else ""
                problems.append(
                    f"model.{key} = {heads} is not a multiple of {ways}: parallel.sequence.mode = {mode.name} gives "
                    f"each of its {ulysses} ranks{tensor} whole heads; use mode 'ring', or {near} heads"
                )
        if self.attention_dropout:
            problems.append(
                f"model.attention_dropout = {self.attention_dropout} is not there under parallel.sequence; set it to 0"
            )
        return problems

    def block_linears(self, shardings: Shardings | None = None) -> list[LinearSpec]:
        """The kinds of matmuls in a block; with the copies of key/value heads that are fewer than the ranks."""
        hidden, wide = self.hidden_size, self.ffn_hidden_size
        kv = self.num_kv_heads * kv_head_copies(self.num_kv_heads, shardings) * self.head_dim
        attention = {"query": self.num_heads * self.head_dim, "key": kv, "value": kv}
        return [
            LinearSpec("column", hidden, attention, out_key=""),  # heads are split whole: checked by their number
            LinearSpec("row", hidden, {"": hidden}),
            LinearSpec("column", hidden, dict.fromkeys(MLPS.get(self.mlp).up, wide), out_key="ffn_hidden_size"),
            LinearSpec("row", wide, {"": hidden}, in_key="ffn_hidden_size"),
        ]

    def num_parameters(self) -> int:
        """Number of parameters of the whole model; a tied one counts once."""
        return self._count(None)

    def num_parameters_per_rank(self, parallel: Any) -> int:
        """Parameters that one rank of the tensor mode stores, with its shard of the padded vocabulary."""
        return self._count(_shardings(parallel.tensor) if parallel.tensor.size > 1 else None)

    def _count(self, shardings: Shardings | None) -> int:
        linears = sum(self.stored(linear, shardings) for linear in self.block_linears(shardings))
        return self.num_layers * (2 * self.norm_parameters + linears) + self.other_parameters(shardings)

    @property
    def norm_parameters(self) -> int:
        """Of one norm."""
        return int(NORMS.get(self.norm).num_parameters(self.hidden_size, self.bias))

    def stored(self, linear: LinearSpec, shardings: Shardings | None) -> int:
        """Elements of weight and bias that a rank holds."""
        weight, bias = Layout.whole(2), Layout.whole(1)
        sizes = shardings.sizes if shardings else {}
        if shardings is not None:
            sharding = shardings.choose(linear.split, linear.inputs, linear.outputs, padded=linear.padded)
            assert isinstance(sharding, MatmulSharding)
            weight, bias = sharding.weight, Layout((sharding.y.features,))
        total = 0
        for out in linear.outputs.values():
            total += math.prod(weight.chunk((out, linear.inputs), sizes))
            total += bias.chunk((out,), sizes)[0] if self.bias and not linear.padded else 0
        return total

    def flops_per_token(self) -> int:
        """Floating-point operations per token of a sequence of seq_len, forward and backward.

        A weight of a linear (of the blocks, and of the head, tied or not) costs 2 operations forward, 2 in dgrad and 2
        in wgrad; a lookup, a norm and a bias cost none. Attention has two matmuls of [seq_len, seq_len] per head,
        scores and their product with the values: 4 hidden_size seq_len per layer and token forward, twice that
        backward. Causal attention is counted in full, although a kernel may skip the masked half, and recomputation
        (activation checkpointing, flash attention's backward) is not counted: so do PaLM (2204.02311, appendix B) and
        Megatron-LM (2104.04473), with whose utilisations ours is to be compared, and torch's FlopCounterMode counts
        the same where attention is plain matmuls.
        """
        block = sum(linear.inputs * sum(linear.outputs.values()) for linear in self.block_linears())
        others = sum(linear.inputs * sum(linear.outputs.values()) for linear in self.other_linears())
        attention = 2 * self.num_heads * self.head_dim * self.seq_len
        return 6 * (self.num_layers * (block + attention) + others)
