"""GPT-2: ``GPTOptions`` with learned positions, layer norms and biases. Its linears are stored ``[in, out]``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from colossus.hf.family import Family, HFTensor, Part, unlike
from colossus.hf.settings import Settings
from colossus.registry import HF_FAMILIES

#: theirs -> ours; ``gelu_pytorch_tanh`` computes what ``gelu_new`` writes out
_ACTIVATIONS = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu"}
_WRITTEN = {"gelu_tanh": "gelu_new", "gelu": "gelu"}


@HF_FAMILIES.register("gpt2")
class GPT2(Family):
    model_type = "gpt2"
    architecture = "GPT2LMHeadModel"
    prefix = "transformer."
    ours = ("GPT",)
    #: masks that older versions saved
    ignored = ("*h.*.attn.bias", "*h.*.attn.masked_bias")

    def to_spec(self, settings: Settings, given: Mapping[str, Any]) -> dict[str, Any]:
        s = settings
        for key, wanted in (
            ("scale_attn_weights", True),
            ("scale_attn_by_inverse_layer_idx", False),
            ("add_cross_attention", False),
        ):
            s.require(key, wanted, wanted)
        hidden = s.count("n_embd", 768)
        dropouts = {} if "dropout" in given else {"dropout": s.one_of(("resid_pdrop", "embd_pdrop"), 0.1, below=1)}
        return dict(
            type="GPT",
            num_layers=s.count("n_layer", 12),
            hidden_size=hidden,
            num_heads=s.count("n_head", 12),
            vocab_size=s.count("vocab_size", 50257),
            seq_len=s.count("n_positions", s.get("n_ctx", 1024)),
            positions="learned",
            mlp=s.choice("activation_function", "gelu_new", _ACTIVATIONS),
            ffn_hidden_size=s.count("n_inner", 4 * hidden),
            norm="layernorm",
            norm_eps=s.number("layer_norm_epsilon", 1e-5),
            bias=True,
            tie_embeddings=s.flag("tie_word_embeddings", True),
            attention_dropout=s.number("attn_pdrop", 0.1, below=1),
            **dropouts,
        )

    def differences(self, options: Any) -> list[str]:
        o = options
        found = unlike(o, positions="learned", norm="layernorm", bias=True, num_kv_heads=o.num_heads)
        found += unlike(o, head_dim=o.hidden_size // o.num_heads)
        return found + ([] if o.mlp in _WRITTEN else [f"mlp = {o.mlp!r} (not 'gelu_tanh' or 'gelu')"])

    def to_config(self, options: Any) -> dict[str, Any]:
        o = options
        return dict(
            vocab_size=o.vocab_size,
            n_positions=o.seq_len,
            n_embd=o.hidden_size,
            n_layer=o.num_layers,
            n_head=o.num_heads,
            n_inner=o.ffn_hidden_size,
            activation_function=_WRITTEN[o.mlp],
            resid_pdrop=o.dropout,
            embd_pdrop=o.dropout,
            attn_pdrop=o.attention_dropout,
            layer_norm_epsilon=o.norm_eps,
            tie_word_embeddings=o.tie_embeddings,
        )

    def tensors(self, options: Any) -> Sequence[HFTensor]:
        return list(self._tensors(options))

    def _tensors(self, options: Any) -> Iterator[HFTensor]:
        o = options
        hidden, wide = o.hidden_size, o.ffn_hidden_size
        tied = ("lm_head.weight",) if o.tie_embeddings else ()
        table = Part("embedding.weight", (o.vocab_size, hidden))
        yield HFTensor("transformer.wte.weight", table.shape, (table,), other_names=tied)
        yield _plain("transformer.wpe.weight", "positions.weight", o.seq_len, hidden)
        for number in range(o.num_layers):
            there, here = f"transformer.h.{number}", f"blocks.{number}"
            yield from _vectors(f"{there}.ln_1", f"{here}.attention_norm", hidden)
            heads = tuple(f"{here}.attention.qkv.{name}" for name in ("query", "key", "value"))
            yield from _linear(f"{there}.attn.c_attn", heads, hidden, hidden)
            yield from _linear(f"{there}.attn.c_proj", (f"{here}.attention.out",), hidden, hidden)
            yield from _vectors(f"{there}.ln_2", f"{here}.mlp_norm", hidden)
            yield from _linear(f"{there}.mlp.c_fc", (f"{here}.mlp.up",), wide, hidden)
            yield from _linear(f"{there}.mlp.c_proj", (f"{here}.mlp.down",), hidden, wide)
        yield from _vectors("transformer.ln_f", "norm", hidden)
        if not o.tie_embeddings:
            yield _plain("lm_head.weight", "head.weight", o.vocab_size, hidden)

    def aliases(self, options: Any) -> dict[str, str]:
        return {"head.weight": "embedding.weight"} if options.tie_embeddings else {}


def _plain(there: str, here: str, *shape: int) -> HFTensor:
    return HFTensor(there, shape, (Part(here, shape),))


def _vectors(there: str, here: str, size: int) -> Iterator[HFTensor]:
    yield _plain(f"{there}.weight", f"{here}.weight", size)
    yield _plain(f"{there}.bias", f"{here}.bias", size)


def _linear(there: str, here: Sequence[str], out: int, inputs: int) -> Iterator[HFTensor]:
    """A Conv1D, whose outputs may be those of several linears."""
    weights = tuple(Part(f"{name}.weight", (out, inputs)) for name in here)
    yield HFTensor(f"{there}.weight", (inputs, len(here) * out), weights, transposed=True)
    yield HFTensor(f"{there}.bias", (len(here) * out,), tuple(Part(f"{name}.bias", (out,)) for name in here))
