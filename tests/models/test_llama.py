"""Llama 2 and 3 as options of the GPT, against plain torch; and what is refused of their options."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.twins import PlainGPT

import colossus
from colossus.checkpoint.state_dict import full_state_dict
from colossus.config import load_config
from colossus.context.parallel_context import one_rank
from colossus.models.gpt import GPT

LLAMA: dict[str, Any] = dict(
    positions="rotary", norm="rmsnorm", mlp="swiglu", bias=False, tie_embeddings=False, num_layers=2, hidden_size=32,
    num_heads=4, ffn_hidden_size=36, vocab_size=30, seq_len=24,
)  # fmt: skip
#: the scaling of Llama 3.1 for an original length at which these few pairs meet all three of its cases
SCALING = dict(
    factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=96, rope_type="llama3"
)
LINEAR = dict(factor=3.0, rope_type="linear")
KINDS: dict[str, dict[str, Any]] = {
    "llama 2": dict(norm_eps=1e-5),
    "llama 3": dict(norm_eps=1e-5, num_kv_heads=2, rotary_base=500000.0),
    "llama 3.1": dict(norm_eps=0.3, num_kv_heads=2, rotary_base=500000.0, rotary_scaling=SCALING),
    "layer norm": dict(norm="layernorm", norm_eps=0.3, rotary_base=30.0, rotary_scaling=LINEAR),
}
IDS = torch.randint(0, 30, (4, 24), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("kind", KINDS)
def test_llama_is_expressible(kind: str) -> None:
    """Under plans `test_plans.py` compares it with itself."""
    context, options = one_rank(), {**LLAMA, **KINDS[kind]}
    ours: Any = colossus.build(lambda: GPT(**options), context, dtype=torch.float64)
    plain = PlainGPT(**options).double()
    plain.load_state_dict(full_state_dict(ours, context))
    loss, _ = ours.loss(ours(IDS), {"labels": IDS.roll(1, 1)})
    want, _ = plain.loss_sum(IDS, IDS.roll(1, 1))
    loss.backward()
    want.backward()
    grads = full_state_dict(ours, context, gradients=True)
    torch.testing.assert_close(loss, want, rtol=1e-12, atol=0)
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(grads[name], parameter.grad, rtol=1e-10, atol=1e-10)


REFUSED = [
    (dict(head_dim=7), "model.head_dim = 7 is not a multiple of 2, of which rotary positions turn pairs"),
    (dict(hidden_size=30), "model.hidden_size = 30 is not a multiple of 2 x model.num_heads = 8 "),
    (dict(rotary_scaling=dict(factor=2.0, low_freq_factor=4.0)), "low_freq_factor = 4.0 is not below high_freq_factor"),
    (dict(rotary_scaling=dict(LINEAR, low_freq_factor=2.0)), "low_freq_factor: rope_type = 'linear' has a factor only"),
]


@pytest.mark.parametrize(("options", "words"), REFUSED)
def test_what_is_refused_before_launch(options: dict[str, Any], words: str, tmp_path: Any) -> None:
    path = tmp_path / "config.py"
    path.write_text(f"model = {dict(type='GPT', positions='rotary') | options!r}\ndata = dict(type='PythonStdlib')\n")
    with pytest.raises(ValueError, match=words):
        load_config(path)
