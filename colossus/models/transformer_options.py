"""Sizes and choices of a transformer, and what follows from them: misfits with a plan, parameters, FLOPs. No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from colossus.arithmetic import not_a_multiple
from colossus.layout.activation import Activation
from colossus.layout.layout import Layout
from colossus.registry import MLPS, NORMS, TENSOR_MODES, Registry
from colossus.tensor_parallel.attention_heads import (
    are_replicated,
    head_problems,
    indivisible_heads,
    replicated_outputs,
    uneven_kv_heads,
)
from colossus.tensor_parallel.choose_sharding import Shardings, unsharded
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
    """A linear of the model, and the options that say how wide it is; empty where another check says more.

    Attributes:
        split: as of `Linear`.
        padded: whether its outputs are those of a head, which need not divide.
        bias: None as the model has it.
        replicated: size of each output whose weight all ranks store that split features (`are_replicated`).
    """

    split: str | None
    inputs: int
    outputs: dict[str, int]
    in_key: str = "hidden_size"
    out_key: str = "hidden_size"
    padded: bool = False
    bias: bool | None = None
    replicated: Mapping[str, int] = field(default_factory=dict)

    @property
    def num_weights(self) -> int:
        return self.inputs * sum(self.outputs.values())


def shardings_of(tensor: Any) -> Shardings | None:
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

    A subclass says how many tokens its blocks see, and what it has beside them: `num_tokens`, `other_linears`,
    `other_parameters`, `num_blocks`.

    Attributes:
        block_names: what a pipeline cuts the model into, in words.
        token_key: the option that must divide where tensor ranks split tokens; None of a model that pads them.
        samples: what a batch consists of, in words.
        counted: what the loss counts, in words: speeds are in these per second.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)
    block_names: ClassVar[str] = "layers"
    token_key: ClassVar[str | None] = None
    samples: ClassVar[str] = "sequences"
    counted: ClassVar[str] = "tokens"

    num_layers: Count = 4
    hidden_size: Count = 128
    num_heads: Count = 4
    #: key/value heads (grouped-query attention); default ``num_heads``
    num_kv_heads: Count = Field(default_factory=lambda values: values["num_heads"])
    #: features of a head; default ``hidden_size / num_heads``
    head_dim: Count = Field(default_factory=lambda values: max(1, values["hidden_size"] // values["num_heads"]))
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
        derived = ("num_kv_heads", "head_dim", "ffn_hidden_size", "norm_eps")
        return {key: item for key, item in value.items() if not (key in derived and item is None)}

    @property
    def num_tokens(self) -> int:
        """Tokens of a sequence in the blocks."""
        raise NotImplementedError

    @property
    def attention_size(self) -> int:
        """Features of all heads."""
        return self.num_heads * self.head_dim

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
            *self._check_heads(),
            *self._check_pipeline(parallel),
            *self.check_sequence(parallel),
            *self._check_tensor(parallel.tensor),
        ]

    def _check_heads(self) -> list[str]:
        given = self.head_dim if "head_dim" in self.model_fields_set else None
        return head_problems(
            self.hidden_size, self.num_heads, self.num_kv_heads, given, rotary=self.is_rotary, prefix="model."
        )

    def check_sequence(self, parallel: Any) -> list[str]:
        """What is wrong with these sizes under ``parallel.sequence``."""
        return []

    def _check_pipeline(self, parallel: Any) -> list[str]:
        if parallel.pipeline.size <= self.num_blocks:
            return []
        return [
            f"model.num_layers = {self.num_layers} gives {self.num_blocks} blocks ({self.block_names}), fewer than the "
            f"stages of parallel.pipeline.size = {parallel.pipeline.size}; every stage needs a block"
        ]

    def _check_tensor(self, tensor: Any) -> list[str]:
        """Sizes that the tensor mode does not divide: of each the one line about the most ranks."""
        shardings = shardings_of(tensor) if tensor.size > 1 else None
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
        if tensor.sequence_sharded and self.token_key is not None:
            check(self.token_key, shardings.regions.residual.tokens)
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

    def block_linears(self, shardings: Shardings | None = None) -> list[LinearSpec]:
        """The kinds of matmuls in a block; key/value heads that are fewer than the ranks as the ranks compute them."""
        hidden, wide = self.hidden_size, self.ffn_hidden_size
        kv, replicated = self.num_kv_heads * self.head_dim, {}
        if shardings is not None and are_replicated(self.num_kv_heads, shardings):
            replicated = dict.fromkeys(("key", "value"), kv)
            kv = shardings.ways(shardings.regions.inner.features) * self.head_dim
        heads = self.attention_size
        attention = {"query": heads, "key": kv, "value": kv}
        return [
            # heads are split whole: checked by their number
            LinearSpec("column", hidden, attention, out_key="", replicated=replicated),
            LinearSpec("row", heads, {"": hidden}, in_key="hidden_size" if heads == hidden else ""),
            LinearSpec("column", hidden, dict.fromkeys(MLPS.get(self.mlp).up, wide), out_key="ffn_hidden_size"),
            LinearSpec("row", wide, {"": hidden}, in_key="ffn_hidden_size"),
        ]

    def num_parameters(self) -> int:
        """Number of parameters of the whole model; a tied one counts once."""
        return self._count(None)

    def num_parameters_per_rank(self, parallel: Any) -> int:
        """Parameters that one rank of the tensor mode stores, with its shard of the padded vocabulary."""
        return self._count(shardings_of(parallel.tensor) if parallel.tensor.size > 1 else None)

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
            if linear.split is None and not isinstance(sharding, MatmulSharding):
                sharding = unsharded(shardings.regions)
            assert isinstance(sharding, MatmulSharding)
            weight = sharding.weight
            bias = Layout(weight.dims[:1] if linear.padded else (sharding.y.features,))
        has_bias = self.bias if linear.bias is None else linear.bias
        total = 0
        for name, out in linear.outputs.items():
            own, own_bias = weight, bias
            if name in linear.replicated:
                assert isinstance(sharding, MatmulSharding)
                out, own, own_bias = linear.replicated[name], replicated_outputs(sharding).weight, Layout.whole(1)
            total += math.prod(own.chunk((out, linear.inputs), sizes))
            total += own_bias.chunk((out,), sizes)[0] if has_bias else 0
        return total

    def flops_per_sample(self) -> int:
        """Floating-point operations per sample of ``num_tokens`` tokens, forward and backward.

        A weight of a linear (of the blocks, and of the head, tied or not) costs 2 operations forward, 2 in dgrad and 2
        in wgrad for each token that it meets; a lookup, a norm and a bias cost none. Attention has two matmuls of
        [num_tokens, num_tokens] per head, scores and their product with the values: 4 x heads x head size x num_tokens
        per layer and token forward, twice that backward. Causal attention is counted in full, although a kernel may
        skip the masked half, and recomputation (activation checkpointing, flash attention's backward) is not counted:
        so do PaLM (2204.02311, appendix B) and Megatron-LM (2104.04473), with whose utilisations ours is to be
        compared, and torch's FlopCounterMode counts the same where attention is plain matmuls.
        """
        block = sum(linear.num_weights for linear in self.block_linears())
        attention = 2 * self.attention_size * self.num_tokens
        blocks = 6 * self.num_layers * (block + attention) * self.num_tokens
        return blocks + self.other_flops_per_sample()

    def other_flops_per_sample(self) -> int:
        """Those of the linears outside of the blocks."""
        return 6 * self.num_tokens * sum(linear.num_weights for linear in self.other_linears())
