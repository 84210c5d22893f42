"""Sizes and choices of the models that come with colossus, and what follows from them. No torch.

Kept apart from the models, so that a config is checked, and parameters are counted, before any process starts.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

Count = Annotated[int, Field(ge=1)]
Probability = Annotated[float, Field(ge=0, lt=1)]


def _default_ffn(values: dict[str, Any]) -> int:
    """4 x hidden for GELU; for SwiGLU, whose three matrices should cost the same, 8/3 x hidden up to a multiple of 64.

    It depends on the model alone: with a size fitted to the tensor ranks, another plan would be another model.
    """
    hidden: int = values["hidden_size"]
    return 4 * hidden if values["mlp"] == "gelu" else _round_up(-(-8 * hidden // 3), 64)


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
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
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
        derived = ("num_kv_heads", "ffn_hidden_size")
        return {key: item for key, item in value.items() if not (key in derived and item is None)}

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    def check(self, parallel: Any) -> list[str]:
        """What is wrong with these sizes, alone and under the ``parallel`` section; one line per problem."""
        return [*self._check_alone(), *self._check_plan(parallel)]

    def _check_alone(self) -> list[str]:
        problems = []
        hidden, heads, kv_heads = self.hidden_size, self.num_heads, self.num_kv_heads
        if hidden % heads:
            problems.append(
                f"model.hidden_size = {hidden} is not a multiple of model.num_heads = {heads}; "
                f"nearest: {_near(hidden, heads)}"
            )
        elif self.positions == "rotary" and self.head_dim % 2:
            problems.append(
                f"model.hidden_size / model.num_heads = {hidden} / {heads} = {self.head_dim} is odd, but rotary "
                f"positions turn pairs of features; nearest hidden_size: {_near(hidden, 2 * heads)}"
            )
        if heads % kv_heads:
            divisors = [n for n in range(1, heads + 1) if heads % n == 0]
            near = min(divisors, key=lambda n: abs(n - kv_heads))
            problems.append(
                f"model.num_kv_heads = {kv_heads} does not divide model.num_heads = {heads} (every key/value head "
                f"serves the same number of query heads); nearest: {near}"
            )
        return problems

    def _check_plan(self, parallel: Any) -> list[str]:
        problems = []
        if parallel.pipeline > self.num_layers:
            problems.append(
                f"model.num_layers = {self.num_layers} is fewer than the stages of parallel.pipeline = "
                f"{parallel.pipeline}; every stage needs a layer"
            )
        ranks = parallel.tensor.size
        if parallel.tensor.mode != "1d" or ranks == 1:
            return problems  # the other modes check their boxes with their tables
        by = f"parallel.tensor.size = {ranks}"
        divided = {key: getattr(self, key) for key in ("hidden_size", "num_heads", "ffn_hidden_size")}
        grouped = self.num_kv_heads != self.num_heads
        if grouped and self.num_kv_heads < ranks:
            problems.append(
                f"model.num_kv_heads = {self.num_kv_heads} is fewer than {by}: 1D tensor parallelism gives every rank "
                f"whole key/value heads and does not copy them, so at most {self.num_kv_heads} tensor ranks can share "
                f"this model; use parallel.tensor.size={self.num_kv_heads} or less, or model.num_kv_heads={ranks}"
            )
        elif grouped:
            divided["num_kv_heads"] = self.num_kv_heads
        if parallel.tensor.sequence_sharded:
            divided["seq_len"] = self.seq_len
        for key, value in divided.items():
            if value % ranks:
                problems.append(f"model.{key} = {value} is not a multiple of {by}; nearest: {_near(value, ranks)}")
        return problems

    def num_parameters(self) -> int:
        """Number of parameters of the whole model; a tied head is the embedding and counts once."""
        return self._count(1)

    def num_parameters_per_rank(self, tensor_size: int) -> int:
        """Parameters that one rank of 1D tensor parallelism stores, with its part of the padded vocabulary."""
        return self._count(tensor_size)

    def _count(self, ranks: int) -> int:
        hidden = self.hidden_size
        norm = hidden * (2 if self.norm == "layernorm" and self.bias else 1)
        # Column-parallel outputs (q, k, v; up and gate) carry their part of the bias, row-parallel ones the whole.
        column = (hidden + 2 * self.num_kv_heads * self.head_dim) // ranks
        column += self.ffn_hidden_size * (2 if self.mlp == "swiglu" else 1) // ranks
        row = (hidden + self.ffn_hidden_size) // ranks
        block = 2 * norm + column * hidden + row * hidden + (column + 2 * hidden if self.bias else 0)
        vocabulary = _round_up(self.vocab_size, ranks) // ranks * hidden
        positions = self.seq_len * hidden if self.positions == "learned" else 0
        return self.num_layers * block + norm + positions + vocabulary * (1 if self.tie_embeddings else 2)

    def flops_per_token(self) -> int:
        """Floating-point operations per token, forward and backward: 6 N + 12 L H S.

        N counts the weights that are matmuls (blocks and head; no lookup, norm or bias): two operations forward and
        four backward for each. L H S is layers x hidden x seq_len, for the scores and their use on the values: the
        whole S x S matrix is counted although a causal one needs half, as is usual when a utilisation is quoted, and
        recomputation is not counted. Chowdhery et al., "PaLM" (2022), appendix B.
        """
        hidden, ffn = self.hidden_size, self.ffn_hidden_size
        attention = 2 * hidden * hidden + 2 * hidden * self.num_kv_heads * self.head_dim
        mlp = hidden * ffn * (3 if self.mlp == "swiglu" else 2)
        matmuls = self.num_layers * (attention + mlp) + self.vocab_size * hidden
        return 6 * matmuls + 12 * self.num_layers * hidden * self.seq_len


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _near(value: int, multiple: int) -> str:
    """The multiples on either side of ``value``."""
    near = {value // multiple * multiple, _round_up(value, multiple)} - {0}
    return " or ".join(map(str, sorted(near)))
