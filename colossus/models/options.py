"""Sizes and choices of the models that come with colossus, and what follows from them. No torch.

Kept apart from the models, so that a config is checked, and parameters are counted, before any process starts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from colossus.arithmetic import either, nearest_multiples, not_a_multiple, round_up
from colossus.layers.rotary_scaling import RotaryScaling
from colossus.layout.activation import Activation
from colossus.layout.layout import Layout
from colossus.registry import SEQUENCE_MODES, TENSOR_MODES
from colossus.sequence_parallel.order import length_multiple
from colossus.sequence_parallel.traffic import cheaper
from colossus.tensor_parallel.choice import Shardings
from colossus.tensor_parallel.head_counts import head_problems, indivisible_heads, kv_head_copies, uneven_kv_heads
from colossus.tensor_parallel.mode import MatmulSharding

Count = Annotated[int, Field(ge=1)]
Probability = Annotated[float, Field(ge=0, lt=1)]


def _default_ffn(values: dict[str, Any]) -> int:
    """4 x hidden for GELU; for SwiGLU, whose three matrices should cost the same, 8/3 x hidden up to a multiple of 64.

    It depends on the model alone: with a size fitted to the tensor ranks, another plan would be another model.
    """
    hidden: int = values["hidden_size"]
    return 4 * hidden if values["mlp"] == "gelu" else round_up(-(-8 * hidden // 3), 64)


def _default_eps(values: dict[str, Any]) -> float:
    return 1e-5 if values["norm"] == "layernorm" else 1e-6


@dataclass(frozen=True)
class _LinearSpec:
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


class GPTOptions(BaseModel):
    """Options of the GPT: ``model = dict(type="GPT", num_layers=8, ...)``."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    num_layers: Count = 4
    hidden_size: Count = 128
    num_heads: Count = 4
    #: key/value heads (grouped-query attention); default ``num_heads``
    num_kv_heads: Count = Field(default_factory=lambda values: values["num_heads"])
    #: number of tokens; padded inside of the model when it does not divide by the tensor ranks
    vocab_size: Count = 256
    seq_len: Count = 128
    mlp: Literal["gelu", "swiglu"] = "gelu"
    ffn_hidden_size: Count = Field(default_factory=_default_ffn)
    positions: Literal["learned", "rotary"] = "learned"
    #: base of the rotary positions: 10000 in Llama 2, 500000 in Llama 3
    rotary_base: Annotated[float, Field(gt=1)] = 10000.0
    #: of Llama 3.1 and later: dict(factor=8.0, original_max_position_embeddings=8192), say
    rotary_scaling: RotaryScaling | None = None
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    #: of all norms; default 1e-5 for layernorm and 1e-6 for rmsnorm
    norm_eps: Annotated[float, Field(gt=0)] = Field(default_factory=_default_eps)
    dropout: Probability = 0.0
    attention_dropout: Probability = 0.0
    tie_embeddings: bool = True
    bias: bool = True
    activation_checkpoint: Literal["none", "full", "selective"] = "none"
    label_smoothing: Probability = 0.0
    z_loss: Annotated[float, Field(ge=0)] = 0.0

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

    def check(self, parallel: Any) -> list[str]:
        """What is wrong with these sizes in any run, and under the ``parallel`` section; one line per problem."""
        rotary = self.positions == "rotary"
        return [
            *head_problems(self.hidden_size, self.num_heads, self.num_kv_heads, rotary=rotary, prefix="model."),
            *self._check_rotary(),
            *self._check_pipeline(parallel),
            *self._check_sequence(parallel),
            *self._check_tensor(parallel.tensor),
        ]

    def _check_rotary(self) -> list[str]:
        if self.positions == "rotary":
            return []
        given = [key for key in ("rotary_base", "rotary_scaling") if key in self.model_fields_set]
        return [
            f"model.{key} = {getattr(self, key)!r} says how positions are rotated, but model.positions = "
            f"{self.positions!r}; set positions='rotary', or leave {key} out"
            for key in given
            if getattr(self, key) != type(self).model_fields[key].default
        ]

    def _check_pipeline(self, parallel: Any) -> list[str]:
        blocks = self.num_layers + 2
        if parallel.pipeline.size <= blocks:
            return []
        return [
            f"model.num_layers = {self.num_layers} gives {blocks} blocks (embedding, layers, head), fewer than the "
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

        for linear in self._linears(shardings):
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

    def _linears(self, shardings: Shardings | None = None) -> list[_LinearSpec]:
        """The kinds of matmuls in the model; with the copies of key/value heads that are fewer than the ranks."""
        hidden, wide = self.hidden_size, self.ffn_hidden_size
        kv = self.num_kv_heads * kv_head_copies(self.num_kv_heads, shardings) * self.head_dim
        up = {"gate": wide, "value": wide} if self.mlp == "swiglu" else {"": wide}
        attention = {"query": self.num_heads * self.head_dim, "key": kv, "value": kv}
        return [
            _LinearSpec("column", hidden, attention, out_key=""),  # heads are split whole: checked by their number
            _LinearSpec("row", hidden, {"": hidden}),
            _LinearSpec("column", hidden, up, out_key="ffn_hidden_size"),
            _LinearSpec("row", wide, {"": hidden}, in_key="ffn_hidden_size"),
            _LinearSpec("column", hidden, {"": self.vocab_size}, padded=True),
        ]

    def num_parameters(self) -> int:
        """Number of parameters of the whole model; a tied head is the embedding and counts once."""
        return self._count(None)

    def num_parameters_per_rank(self, parallel: Any) -> int:
        """Parameters that one rank of the tensor mode stores, with its shard of the padded vocabulary."""
        return self._count(_shardings(parallel.tensor) if parallel.tensor.size > 1 else None)

    def _count(self, shardings: Shardings | None) -> int:
        hidden = self.hidden_size
        norm = hidden * (2 if self.norm == "layernorm" and self.bias else 1)
        sizes = shardings.sizes if shardings else {}
        *linears, head = (self._stored(linear, shardings, sizes) for linear in self._linears(shardings))
        features = shardings.ways(shardings.regions.outer.features) if shardings else 1
        positions = self.seq_len * hidden // features if self.positions == "learned" else 0
        return self.num_layers * (2 * norm + sum(linears)) + norm + positions + head * (1 if self.tie_embeddings else 2)

    def _stored(self, linear: _LinearSpec, shardings: Shardings | None, sizes: Any) -> int:
        """Elements of weight and bias that a rank holds."""
        weight, bias = Layout.whole(2), Layout.whole(1)
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
        *block, head = (linear.inputs * sum(linear.outputs.values()) for linear in self._linears())
        attention = 2 * self.num_heads * self.head_dim * self.seq_len
        return 6 * (self.num_layers * (sum(block) + attention) + head)
