"""Sizes and choices of a transformer, and whether they fit a plan. No torch."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from colossus.arithmetic import not_a_multiple
from colossus.layers.block_options import default_ffn_size, default_norm_eps
from colossus.layout.activation import Activation
from colossus.registry import MLPS, NORMS, TENSOR_MODES, Registry
from colossus.tensor_parallel.attention_heads import head_problems, indivisible_heads, uneven_kv_heads
from colossus.tensor_parallel.choose_sharding import Shardings

Count = Annotated[int, Field(ge=1)]
Probability = Annotated[float, Field(ge=0, lt=1)]


def _known(registry: Registry) -> AfterValidator:
    """A name of a registry."""

    def check(name: str) -> str:
        if name not in registry:
            raise ValueError(registry.missing(name))
        return name

    return AfterValidator(check)


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

    What follows from them alone is here: whether they fit a plan. Parameters and operations are counted on the model
    itself, built on the meta device.

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

    #: transformer blocks
    num_layers: Count = 4
    #: features between blocks
    hidden_size: Count = 128
    #: heads of the queries
    num_heads: Count = 4
    #: key/value heads (grouped-query attention); default ``num_heads``
    num_kv_heads: Count = Field(default_factory=lambda values: values["num_heads"])
    #: features of a head; default ``hidden_size / num_heads``
    head_dim: Count = Field(default_factory=lambda values: max(1, values["hidden_size"] // values["num_heads"]))
    #: gelu, gelu_tanh or swiglu
    mlp: Annotated[str, _known(MLPS)] = "gelu"
    #: features inside of the MLP; by default 4 x hidden_size, of swiglu about 8/3 x
    ffn_hidden_size: Count = Field(
        default_factory=lambda values: default_ffn_size(values["mlp"], values["hidden_size"])
    )
    #: layernorm or rmsnorm
    norm: Annotated[str, _known(NORMS)] = "layernorm"
    #: of all norms; default 1e-5 for layernorm and 1e-6 for rmsnorm
    norm_eps: Annotated[float, Field(gt=0)] = Field(default_factory=lambda values: default_norm_eps(values["norm"]))
    #: after the embedding, attention and MLP
    dropout: Probability = 0.0
    #: of attention weights
    attention_dropout: Probability = 0.0
    #: whether linears and layernorms have biases
    bias: bool = True
    #: of every block; see train.activation_checkpoint
    activation_checkpoint: Literal["none", "full", "selective"] = "none"

    @model_validator(mode="before")
    @classmethod
    def _none_is_default(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        derived = ("num_kv_heads", "head_dim", "ffn_hidden_size", "norm_eps")
        return {key: item for key, item in value.items() if not (key in derived and item is None)}

    @property
    def is_rotary(self) -> bool:
        """Whether positions are rotated in attention."""
        return False

    @property
    def num_blocks(self) -> int:
        """Into how many stages a pipeline can cut the model at most: its layers and its two ends."""
        return self.num_layers + 2

    def check(self, parallel: Any) -> list[str]:
        """What is wrong with these sizes in any run, and under the ``parallel`` section; one line per problem."""
        given = self.head_dim if "head_dim" in self.model_fields_set else None
        problems = head_problems(
            self.hidden_size, self.num_heads, self.num_kv_heads, given, rotary=self.is_rotary, prefix="model."
        )
        return [
            *problems,
            *self._check_pipeline(parallel),
            *self.check_sequence(parallel),
            *self._check_tensor(parallel.tensor),
        ]

    def _check_pipeline(self, parallel: Any) -> list[str]:
        if parallel.pipeline.size <= self.num_blocks:
            return []
        return [
            f"model.num_layers = {self.num_layers} gives {self.num_blocks} blocks ({self.block_names}), fewer than the "
            f"stages of parallel.pipeline.size = {parallel.pipeline.size}; every stage needs a block"
        ]

    def check_sequence(self, parallel: Any) -> list[str]:
        """What is wrong with these sizes under ``parallel.sequence``."""
        return []

    def _check_tensor(self, tensor: Any) -> list[str]:
        """Sizes that the tensor mode does not divide: of each the one line about the most ranks.

        Layers say the same of what no option says alone (heads x head_dim over the ranks of a 3D mode, say), when the
        model is built on the meta device before a launch.
        """
        shardings = shardings_of(tensor) if tensor.size > 1 else None
        if shardings is None:
            return []  # sizes that the mode cannot take are refused with the plan
        undivided: dict[str, tuple[int, tuple[str, ...]]] = {}

        def check(key: str, axes: tuple[str, ...]) -> None:
            ways = shardings.ways(axes)
            if getattr(self, key) % ways and ways > undivided.get(key, (1, ()))[0]:
                undivided[key] = ways, axes

        hidden, wide = "hidden_size", "ffn_hidden_size"
        divisible = dict.fromkeys(("query", "key", "value"), tensor.size)  # heads are split whole: see below
        linears: list[tuple[str, str, str, dict[str, int]]] = [
            ("column", hidden, "", divisible),
            ("column", hidden, wide, {"": self.ffn_hidden_size}),
            ("row", wide, hidden, {"": self.hidden_size}),
        ]
        for split, inside, outside, outputs in linears:
            chosen = shardings.choose(split, getattr(self, inside), outputs)
            for misfit in chosen if isinstance(chosen, list) else ():
                check(inside if misfit.name == "in_features" else outside, misfit.axes)
        for misfit in indivisible_heads(self.num_heads, self.num_kv_heads, shardings):
            check(misfit.name, misfit.axes)
        if tensor.sequence_sharded and self.token_key is not None:
            check(self.token_key, shardings.regions.residual.tokens)
        problems = []
        for key, (ways, axes) in undivided.items():
            value = getattr(self, key)
            by = f"the {ways} ranks of {' x '.join(axes)} (parallel.tensor.mode = {tensor.mode})"
            if ways == tensor.size:
                by = f"parallel.tensor.size = {ways}"
            if key == "num_kv_heads" and value < ways:
                problems.append(uneven_kv_heads(value, by, prefix="model."))
            else:
                problems.append(not_a_multiple(f"model.{key}", value, by, ways))
        return problems
