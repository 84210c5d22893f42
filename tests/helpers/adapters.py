"""Kinds of adapters of peft, small."""

from __future__ import annotations

from typing import Any

LORA: dict[str, Any] = dict(r=4, lora_dropout=0.0, init_lora_weights=False)
_ATTENTION: dict[str, Any] = dict(target_modules=["q_proj", "v_proj"])
#: class of the config, its options
ADAPTERS: dict[str, tuple[str, dict[str, Any]]] = {
    "DoRA": ("LoraConfig", LORA | dict(use_dora=True, target_modules=["q_proj", "v_proj", "down_proj"])),
    "prompt tuning": ("PromptTuningConfig", dict(num_virtual_tokens=3)),
    "LoRA and words": ("LoraConfig", LORA | dict(target_modules=["q_proj", "embed_tokens"])),
    "LoRA and a head": ("LoraConfig", LORA | dict(target_modules=["q_proj"], modules_to_save=["lm_head"])),
    "prefix tuning": ("PrefixTuningConfig", dict(num_virtual_tokens=3)),
    "p-tuning": ("PromptEncoderConfig", dict(num_virtual_tokens=3, encoder_hidden_size=8)),
    "IA3": ("IA3Config", dict(target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"])),
    "VeRA": ("VeraConfig", _ATTENTION | dict(r=4)),
    "OFT": ("OFTConfig", _ATTENTION | dict(oft_block_size=4)),
    "LoHa": ("LoHaConfig", _ATTENTION | dict(r=2, init_weights=False)),
}
