"""Sizes and choices of the models that come with colossus, and the check that they fit a plan. No torch."""

from __future__ import annotations

from functools import lru_cache, partial
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from colossus.arithmetic import not_a_multiple
from colossus.layers.block_options import default_ffn_size, default_norm_eps
from colossus.layout.activation import Activation
from colossus.models.attention_options import AttentionOptions
from colossus.models.tuning_options import LoRAOptions, Objective, ReferenceOptions, tuning_problem
from colossus.registry import MLPS, MODELS, NORMS, SEQUENCE_MODES, TENSOR_MODES, Registry
from colossus.sequence_parallel.mask import Mask
from colossus.sequence_parallel.modes import cheaper, length_multiple
from colossus.tensor_parallel.attention_heads import head_problems, indivisible_heads, uneven_kv_heads
from colossus.tensor_parallel.choose_sharding import Shardings

Count = Annotated[int, Field(ge=1)]
Probability = Annotated[float, Field(ge=0, lt=1)]


def _registered(registry: Registry, name: str) -> str:
    if name not in registry:
        raise ValueError(registry.missing(name))
    return name


def shardings_of(tensor: Any) -> Shardings | None:
    """Return the shardings of a ``parallel.tensor`` section; None when its sizes do not fit the mode."""
    sides = tensor.size, tensor.depth, tensor.shape
    return _shardings(tensor.mode, sides, tensor.sequence_sharded, tensor.gathered == "keep")


@lru_cache(maxsize=1024)
def _shardings(name: Any, sides: tuple[Any, ...], split_tokens: bool, keep: bool) -> Shardings | None:
    mode = TENSOR_MODES.get(name)
    try:
        sizes = mode.axis_sizes(*sides)
    except ValueError:
        return None
    return Shardings.of(mode, Activation(), sizes, sequence_sharded=split_tokens and mode.splits_tokens, keep=keep)


def kind_of(options: Any) -> str | None:
    """Return the registered name of the model with these options, or None."""
    return next((name for name in MODELS.names() if MODELS.options(name) is type(options)), None)


class TransformerOptions(BaseModel):
    """The options of every transformer of colossus, and the check that they fit a plan.

    Attributes:
        token_key: the option that must divide where tensor ranks split tokens; None for a model that pads them.
        samples: the name of the samples of a batch, for messages.
        counted: the unit that the loss counts, in words: speeds are in these per second.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)
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
    #: gelu, gelu_tanh, swiglu or geglu_tanh
    mlp: Annotated[str, AfterValidator(partial(_registered, MLPS))] = "gelu"
    #: features inside the MLP; by default 4 x hidden_size, for gated ones about 8/3 x
    ffn_hidden_size: Count = Field(
        default_factory=lambda values: default_ffn_size(values["mlp"], values["hidden_size"])
    )
    #: layernorm, rmsnorm, or zero_centered_rmsnorm (Gemma)
    norm: Annotated[str, AfterValidator(partial(_registered, NORMS))] = "layernorm"
    #: epsilon of all norms; default 1e-5 for layernorm and 1e-6 for the others
    norm_eps: Annotated[float, Field(gt=0)] = Field(default_factory=lambda values: default_norm_eps(values["norm"]))
    #: dropout after the embedding, attention and MLP
    dropout: Probability = 0.0
    #: dropout of attention weights
    attention_dropout: Probability = 0.0
    #: biases in linears and layernorms
    bias: bool = True
    #: activation checkpointing of every block; see train.activation_checkpoint
    activation_checkpoint: Literal["none", "full", "selective"] = "none"

    @model_validator(mode="before")
    @classmethod
    def _none_is_default(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        derived = ("num_kv_heads", "head_dim", "ffn_hidden_size", "norm_eps", "attention_pattern")
        return {key: item for key, item in value.items() if not (key in derived and item is None)}

    @property
    def is_rotary(self) -> bool:
        """True if attention rotates queries and keys by their positions."""
        return False

    def block_options(self, layer: int) -> dict[str, Any]:
        """Return options of the `TransformerBlock` of a layer, from 0, beside those of all transformers."""
        return {"mask": self.mask(layer), "head_dim": self.head_dim}

    def mask(self, layer: int) -> Mask:
        """Return what a token attends to in a layer, from 0."""
        return Mask.full()

    @property
    def has_mlps(self) -> bool:
        """True if any layer has an MLP."""
        return True

    @property
    def num_blocks(self) -> int:
        """The most stages into which a pipeline can cut the model: its layers and its two ends."""
        return self.num_layers + 2

    def check(self, parallel: Any) -> list[str]:
        """Return the problems of these sizes in any run, and under the ``parallel`` section; one line each."""
        head_dim = self.head_dim if "head_dim" in self.model_fields_set else None
        problems = head_problems(
            self.hidden_size, self.num_heads, self.num_kv_heads, head_dim, rotary=self.is_rotary, prefix="model."
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
            f"model.num_layers = {self.num_layers} gives {self.num_blocks} blocks (layers and both ends), fewer than "
            f"parallel.pipeline.size = {parallel.pipeline.size}; every stage needs a block"
        ]

    def check_sequence(self, parallel: Any) -> list[str]:
        """Return the problems of these sizes under ``parallel.sequence``."""
        if parallel.sequence.size == 1:
            return []
        return [f"parallel.sequence.size = {parallel.sequence.size}: no tokens that could be split enter this model"]

    def _check_tensor(self, tensor: Any) -> list[str]:
        """Return one line for each size that the tensor mode does not divide, about the most ranks.

        Layers check other sizes when the model is built on the meta device before a launch.
        """
        shardings = shardings_of(tensor) if tensor.size > 1 else None
        if shardings is None:
            return []  # the check of the plan reports sizes that the mode cannot take
        undivided: dict[str, tuple[int, tuple[str, ...]]] = {}

        def check(key: str, axes: tuple[str, ...]) -> None:
            ways = shardings.ways(axes)
            if getattr(self, key) % ways and ways > undivided.get(key, (1, ()))[0]:
                undivided[key] = ways, axes

        hidden, wide = "hidden_size", "ffn_hidden_size"
        divisible = dict.fromkeys(("query", "key", "value"), tensor.size)  # heads are checked below
        linears: list[tuple[str, str, str, dict[str, int]]] = [("column", hidden, "", divisible)]
        if self.has_mlps:
            linears.append(("column", hidden, wide, {"": self.ffn_hidden_size}))
            linears.append(("row", wide, hidden, {"": self.hidden_size}))
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
            ranks = f"the {ways} ranks of {' x '.join(axes)} (parallel.tensor.mode = {tensor.mode})"
            by = f"parallel.tensor.size = {ways}" if ways == tensor.size else ranks
            if key == "num_kv_heads" and value < ways:
                problems.append(uneven_kv_heads(value, by, prefix="model."))
            else:
                problems.append(not_a_multiple(f"model.{key}", value, by, ways))
        return problems


class DecoderOptions(AttentionOptions, TransformerOptions):
    """The options of every language model of colossus."""

    token_key: ClassVar[str | None] = "seq_len"
    #: tables with a row for each position: a model with fewer positions loads the first rows of another's
    positions_by_row: ClassVar[tuple[str, ...]] = ("positions.weight",)
    #: the model's logits cover the whole vocabulary
    generates: ClassVar[bool] = True

    #: tokens of a sequence
    seq_len: Count = 128
    #: size of the vocabulary; the model pads it when it does not divide by the tensor ranks
    vocab_size: Count = 256
    #: norms before attention and MLP; after them, x + norm(attention(x)) (OLMo 2); or both (Gemma)
    norm_place: Literal["before", "after", "both"] = "before"
    #: factor of the embedding of each token (hidden_size ** 0.5 in Gemma); default 1
    embedding_scale: Annotated[float, Field(gt=0)] | None = None
    #: bound of the logits, logit_cap * tanh(logit / logit_cap) (Gemma 2); default none
    logit_cap: Annotated[float, Field(gt=0)] | None = None
    #: the head uses the weight of the embedding
    tie_embeddings: bool = True
    #: the gradient of the embedding has only the rows that a batch touches (`colossus.layers.Embedding`, sparse)
    sparse_embeddings: bool = False
    #: part of a label's weight that is spread over all classes
    label_smoothing: Probability = 0.0
    #: weight of the squared logarithm of the softmax' divisor, which keeps logits small
    z_loss: Annotated[float, Field(ge=0)] = 0.0
    #: rows (samples x tokens) of the logits that a rank has at a time, for less memory; default all of a microbatch
    loss_chunk: Count | None = None
    #: weight of the loss of a further block that predicts the token after the next, in training alone (2412.19437)
    mtp_weight: Annotated[float, Field(ge=0)] = 0.0
    #: loss in place of next tokens' cross-entropy: dict(type="dpo" or "distillation" or "grpo", **options)
    objective: Objective | None = None
    #: adapters in place of all weights: dict(rank=8, alpha=16, targets=["query", "value"])
    lora: LoRAOptions | None = None
    #: a frozen model for the objective: dict(weights="runs/sft")
    reference: ReferenceOptions | None = None

    @model_validator(mode="after")
    def _gradients_are_dense(self) -> DecoderOptions:
        if self.mtp_weight and self.sparse_embeddings:
            raise ValueError("mtp_weight uses the embedding twice, for which sparse_embeddings has no gradient")
        return self

    @property
    def counted(self) -> str:  # type: ignore[override]
        """The unit that the loss counts."""
        return "pairs" if self.objective is not None and self.objective.type == "dpo" else "tokens"

    @model_validator(mode="after")
    def _is_tuned(self) -> DecoderOptions:
        if problem := tuning_problem(self):
            raise ValueError(problem)
        return self

    def block_options(self, layer: int) -> dict[str, Any]:
        own = {"rotary": self.is_rotary, "norm_place": self.norm_place}
        qk_norm = self.qk_norm and (self.norm if self.norm.endswith("rmsnorm") else "rmsnorm")
        return super().block_options(layer) | self.attention_arguments(layer) | own | {"qk_norm": qk_norm}

    def sequence_mode(self, parallel: Any) -> str:
        """Return ring or Ulysses, the one that sends fewer bytes for this attention."""
        ways = self._head_ways(parallel)
        heads, kv_heads = max(1, self.num_heads // ways), max(1, self.num_kv_heads // ways)
        return cheaper(self.seq_len, heads, kv_heads, self.head_dim, parallel.sequence.size)

    def _head_ways(self, parallel: Any) -> int:
        """Return the number of ranks over which tensor parallelism splits the heads."""
        shardings = shardings_of(parallel.tensor) if parallel.tensor.size > 1 else None
        return shardings.ways(shardings.regions.inner.features) if shardings is not None else 1

    def check_sequence(self, parallel: Any) -> list[str]:
        sequence = parallel.sequence
        if sequence.size == 1:
            return []
        problems = []
        mode = SEQUENCE_MODES.get(sequence.mode or "ring")
        try:
            ring, ulysses = mode.ways(sequence.size, sequence.ulysses)
        except ValueError:
            return []  # the check of the plan reports it
        step = length_multiple(ring, ulysses, sequence.chunks)
        if self.seq_len % step and not sequence.pad:
            by = f"{step}, into which parallel.sequence.size = {sequence.size} in mode {mode.name} cuts it"
            problems.append(f"{not_a_multiple('model.seq_len', self.seq_len, by, step)}; or parallel.sequence.pad=True")
        ways = self._head_ways(parallel) * ulysses
        by = f"{ways}, the ranks of parallel.tensor and mode {mode.name} that get whole heads"
        for key in ("num_heads", "num_kv_heads"):
            if ulysses > 1 and getattr(self, key) % ways:
                problems.append(not_a_multiple(f"model.{key}", getattr(self, key), by, ways))
        if self.attention_dropout:
            problems.append(
                f"model.attention_dropout = {self.attention_dropout}: parallel.sequence supports none; set it to 0"
            )
        return problems


class GPTOptions(DecoderOptions):
    """Options of the GPT: ``model = dict(type="GPT", num_layers=8, ...)``."""

    #: kind of the positions of tokens
    positions: Literal["learned", "rotary"] = "learned"

    @property
    def is_rotary(self) -> bool:
        return self.positions == "rotary"
