"""Models of transformers that take pictures and text."""

from __future__ import annotations

from typing import Any

import torch
from helpers.outside_models.batches import (
    HEADS,
    INNER,
    TOKENS,
    VOCAB,
    WIDTH,
    both,
    distances,
    images,
    padded,
    tokens,
)  # fmt: skip
from helpers.outside_models.hugging_face import GROUPED
from helpers.outside_models.rows import outside
from helpers.user_models.cases import Batch
from torch import nn

_TOWER: dict[str, Any] = dict(
    hidden_size=WIDTH, intermediate_size=INNER, num_hidden_layers=2, num_attention_heads=HEADS, attention_dropout=0.0,
    projection_dim=16,
)  # fmt: skip
_SEEN = dict(**_TOWER, initializer_range=0.2, image_size=16, patch_size=4)
_pictures = images(16, 16, "pixel_values")


def _captions(step: int) -> Batch:
    """Pictures with texts that end with the last token of the vocabulary."""
    batch = both(_pictures, tokens)(step)
    batch["inputs"]["input_ids"][:, -1] = VOCAB - 1
    return batch


def clip() -> nn.Module:
    from transformers import CLIPConfig, CLIPModel

    read = dict(**_TOWER, vocab_size=VOCAB, max_position_embeddings=TOKENS, eos_token_id=VOCAB - 1)
    return CLIPModel(CLIPConfig(text_config=read, vision_config=_SEEN, projection_dim=16))


def siglip() -> nn.Module:
    from transformers import SiglipConfig, SiglipModel

    read = dict(**_TOWER | dict(projection_size=WIDTH), vocab_size=VOCAB, max_position_embeddings=TOKENS)
    return SiglipModel(SiglipConfig(text_config=read, vision_config=_SEEN))


#: the losses of both look from sample to sample, which data ranks do not
_apart = distances("image_embeds", "text_embeds")
outside("CLIP", clip, _captions, loss=_apart, example=True)
outside("SigLIP", siglip, _captions, loss=_apart, example=True)


def llava() -> nn.Module:
    from transformers import LlavaConfig, LlavaForConditionalGeneration

    read, seen = dict(model_type="llama", **GROUPED), dict(model_type="clip_vision_model", **_SEEN)
    return LlavaForConditionalGeneration(
        LlavaConfig(text_config=read, vision_config=seen, image_token_index=VOCAB - 1, vision_feature_layer=-2)
    )


def _questions(step: int) -> Batch:
    """A text with a place for each of the picture's 16 patches before its own tokens."""
    batch = both(_pictures, tokens)(step)
    ids, labels = batch["inputs"]["input_ids"] % (VOCAB - 1), batch["labels"]
    batch["inputs"]["input_ids"] = torch.cat([torch.full((len(ids), 16), VOCAB - 1), ids], 1)
    return batch | {"labels": torch.cat([torch.full((len(ids), 16), -100), labels], 1)}


outside("LLaVA", llava, _questions, example=True)


def blip() -> nn.Module:
    from transformers import BlipConfig, BlipForConditionalGeneration

    read = dict(
        **_TOWER | dict(encoder_hidden_size=WIDTH, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0),
        vocab_size=VOCAB, max_position_embeddings=TOKENS, use_cache=False,
    )  # fmt: skip
    return BlipForConditionalGeneration(BlipConfig(text_config=read, vision_config=_SEEN, projection_dim=16))


def _described(step: int) -> Batch:
    return padded(both(_pictures, tokens), step)


outside("BLIP", blip, _described, example=True)
