"""Heads of models of transformers in a config: tied to the table of words or not, split where that is."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.long import but
from helpers.ranks import run_ranks

import colossus
from colossus.hf.native import is_transposed
from colossus.state.model_state_dict import full_state_dict

pytestmark = pytest.mark.skipif(find_spec("transformers") is None, reason="scripts/test installs transformers")
SIZES: dict[str, Any] = dict(
    vocab_size=12, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
    num_key_value_heads=1, head_dim=8, max_position_embeddings=16, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
#: model type -> what else its config needs; the layer that its tied and its own head become
FAMILIES: dict[str, tuple[dict[str, Any], str, str]] = {
    "gemma3_text": ({}, "Linear", "LMHead"),  # their tables scale what they look up, and stay whole
    "llama": ({}, "LMHead", "LMHead"),
    "gemma2": ({}, "Linear", "LMHead"),
    "qwen3": ({}, "LMHead", "LMHead"),
    "phi": ({}, "LMHead", "LMHead"),
    "gpt_neox": ({}, "LMHead", "LMHead"),
    "gpt2": (dict(n_embd=16, n_layer=1, n_head=2, n_positions=16), "LMHead", "LMHead"),
    "opt": (dict(ffn_dim=24, word_embed_proj_dim=16), "LMHead", "LMHead"),
    "bert": (dict(architectures=["BertForMaskedLM"]), "LMHead", "LMHead"),
}
IDS = torch.arange(8).view(2, 4) % 11 + 1
LABELS = IDS * 3 % 12


def evaluated(rank: int, kind: str, plan: dict[str, Any]) -> list[tuple[bool, str, float, dict[str, Any]]]:
    out = []
    for tied in (True, False):
        model = dict(type="hf", config=dict(model_type=kind, tie_word_embeddings=tied, **SIZES, **FAMILIES[kind][0]))
        train = dict(global_batch_size=2, precision="fp64")
        engine = colossus.initialize(dict(model=model, parallel=plan, train=train, device="cpu"))
        loss = engine.eval_step({"input_ids": IDS, "labels": LABELS}).loss
        became = type(engine.model.get_output_embeddings()).__name__
        out.append((tied, became, float(loss), full_state_dict(engine.model, engine.context)))
        engine.close()
    return out


@pytest.mark.parametrize("plan", [{}, pytest.param({"tensor": 2}, marks=pytest.mark.long)], ids=["one process", "1d 2"])
@pytest.mark.parametrize("kind", but([kind for kind in FAMILIES if kind != "gemma3_text"], FAMILIES))
def test_tied_heads_and_others_give_the_loss_of_plain_torch(kind: str, plan: dict[str, Any]) -> None:
    import transformers

    _, when_tied, when_not = FAMILIES[kind]
    for tied, became, loss, state in run_ranks(plan.get("tensor", 1), evaluated, kind, plan, with_context=False)[0]:
        assert became == (when_tied if tied else when_not), tied
        options = {"tie_word_embeddings": tied, **SIZES, **FAMILIES[kind][0]}
        config = transformers.AutoConfig.for_model(kind, **options)
        named = options.get("architectures")
        plain: Any = getattr(transformers, named[0])(config) if named else None
        plain = (plain or transformers.AutoModelForCausalLM.from_config(config)).double().eval()
        plain.load_state_dict(
            {name: value.T if is_transposed(config.to_dict(), name) else value for name, value in state.items()},
            strict=False,
        )
        head, table = plain.get_output_embeddings().weight, plain.get_input_embeddings().weight
        assert (head is table) == tied
        with torch.no_grad():
            logits = plain(input_ids=IDS).logits
        assert abs(loss - F.cross_entropy(logits.flatten(0, 1), LABELS.flatten()).item()) < 1e-10
