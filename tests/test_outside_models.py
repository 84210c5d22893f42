"""Models that nobody here wrote, parallelized as they are: every cell equals plain torch, or is refused in words."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest
from helpers.outside_models import OUTSIDE, oracle_of
from helpers.user_models.table import PLANS, fill

#: by default: most plans with some models, most kinds of models under some plan
SOME = {
    "data 2": ("x-transformers decoder",),
    "data 2 expert 2": ("Mixtral",),
    "data 2 zero 3": ("ViT",),
    "1d 2": ("T5",),
    "2d 4": ("Llama",),
    "pipeline 2 1f1b": ("BERT", "T5"),
}
#: with all models
ALL = ("data 2", "data 2 zero 3", "1d 2", "2d 4", "3d 8", "pipeline 2 1f1b")
#: with these
MORE = {
    "data 2 expert 2": ("Mixtral", "Qwen3-MoE", "gpt-oss"),
    "1d 4": ("GPT-2", "Llama", "Llama, padded", "Qwen3-MoE", "T5", "ViT", "x-transformers decoder"),
    "2.5d 8": ("GPT-2", "Llama", "Llama, padded", "Qwen3-MoE", "T5", "ViT", "x-transformers decoder"),
}


#: under the sequence axis: what is refused, and the beginning of why
_IMAGES, _CONVOLUTIONS = "a sequence of 3 tokens does not split", "conv"
REFUSED_SEQUENCES = {
    **dict.fromkeys(
        (
            *("ViT", "DeiT", "BEiT", "DINOv2", "Swin", "Swin 2", "ConvNeXt", "ResNet", "RegNet", "PoolFormer", "DPT"),
            *("SegFormer", "ViT with all hidden states", "CLIP", "SigLIP", "LLaVA", "BLIP", "own UNet", "own DiT"),
            *("timm ViT", "timm EVA", "timm BEiT", "timm MLP-Mixer", "timm ConvNeXt", "timm Swin", "timm RegNet"),
            *("timm EfficientNet", "own AllConvolutional"),
        ),
        _IMAGES,
    ),
    **dict.fromkeys(
        ("Mamba", "Mamba 2", "Jamba", "Whisper", "wav2vec2", "WavLM", "HuBERT", "AST", "own MinimalMamba"),
        _CONVOLUTIONS,
    ),
    **dict.fromkeys(("DeepSeek-V2", "DeepSeek-V3"), "copy_ writes a split tensor into a plain one"),
    **dict.fromkeys(("PatchTST, batchnorm", "PatchTST, layernorm", "PatchTSMixer"), "unfold is not known"),
    **{
        "RWKV": "pad is",
        "MobileBERT": "pad is",
        "FNet": "fft_fftn is",
        "MAE": "argsort works along",
        "own RecurrentWords": "lstm is",
    },
}

#: two of each kind
_DECODERS_AND_ENCODERS = [
    *("Llama", "Llama, padded", "GPT-2", "GPT-2, padded", "Falcon", "BLOOM, padded", "BERT", "BERT, padded", "T5"),
    *("T5, padded", "Qwen3", "OPT, padded", "x-transformers decoder", "own TorchTransformer"),
]

#: the models of the table on the page on sequence parallelism
NAMED = ("Llama", "Qwen3", "Mistral", "Gemma 3", "gpt-oss", "GPT-2", "GPT-NeoX", "OLMo 2", "ViT", "BERT")

oracle = cache(oracle_of)


def require(names: Sequence[str], plan: str) -> None:
    microbatches = PLANS[plan].schedule.get("microbatches", 1)
    runs = {name: oracle(name, microbatches if OUTSIDE[name].has_batch_norm else 1) for name in names}
    wrong = [cell for cell in fill([OUTSIDE[name] for name in names], [plan], runs) if not cell.holds]
    assert not wrong, "\n".join(f"{cell.model} under {cell.plan}: {cell.outcome}: {cell.words}" for cell in wrong)


@pytest.mark.parametrize("plan", SOME)
@pytest.mark.rest("2d 4", "data 2", "pipeline 2 1f1b", "data 2 zero 3")
def test_some_models(plan: str) -> None:
    require(SOME[plan], plan)


@pytest.mark.skipif(find_spec("timm") is None, reason="scripts/test installs timm")
def test_a_model_of_timm() -> None:
    require(["timm MLP-Mixer"], "1d 2")


@pytest.mark.long
@pytest.mark.parametrize("plan", ALL)
def test_all_models(plan: str) -> None:
    require(list(OUTSIDE), plan)


def require_sequences(names: Sequence[str], plan: str) -> None:
    wrong = []
    for cell in fill([OUTSIDE[name] for name in names], [plan], {name: oracle(name, 1) for name in names}):
        why = REFUSED_SEQUENCES.get(cell.model.removesuffix(", padded"))
        if (cell.outcome != "equal") if why is None else not cell.words.startswith(why):
            wrong.append(f"{cell.model}: {cell.outcome}: {cell.words}")
    assert not wrong, "\n".join(wrong)


def test_some_models_under_the_sequence_axis() -> None:
    require_sequences(["BERT, padded", "GPT-2"], "sequence 2")


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("plan", ["sequence 2", "sequence 4 ulysses", "sequence 2 x 1d 2"])
def test_all_models_under_the_sequence_axis(plan: str) -> None:
    require_sequences(list(OUTSIDE) if plan == "sequence 2" else _DECODERS_AND_ENCODERS, plan)


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("plan", ["sequence 2", "sequence 4", "sequence 2 ulysses", "sequence 4 ulysses"])
def test_named_models_under_the_sequence_axis(plan: str) -> None:
    require_sequences(NAMED, plan)


def test_the_page_has_the_named_models() -> None:
    page = Path("docs/sequence-parallelism.md").read_text()
    cells = dict(re.findall(r"^\| ([^|]+?) \| (equal|refused)", page, flags=re.MULTILINE))
    assert cells == {name: "refused" if name in REFUSED_SEQUENCES else "equal" for name in NAMED}


@pytest.mark.long
@pytest.mark.parametrize("plan", MORE)
def test_more_plans(plan: str) -> None:
    require(MORE[plan], plan)
