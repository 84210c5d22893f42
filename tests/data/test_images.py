"""Images that come without a download."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from colossus.config import ConfigError, load_config
from colossus.data import Digits
from colossus.launch.checks import check_data
from colossus.registry import DATASETS

CONFIG = str(Path(__file__).parents[2] / "configs" / "vit_digits.py")


@pytest.fixture(scope="module")
def splits() -> dict[str, Digits]:
    pytest.importorskip("sklearn", reason="needs the extra: pip install 'colossus[images]'")
    return {split: Digits(split) for split in ("train", "validation")}


def test_the_split_is_fixed_and_complete(splits: dict[str, Digits]) -> None:
    from sklearn.datasets import load_digits

    assert DATASETS.get("Digits") is Digits
    train, validation = splits["train"], splits["validation"]
    assert (len(train), len(validation)) == (1440, 357)
    digits = load_digits()
    held_out = [number for number in range(1797) if number % 50 >= 40]
    rest = [number for number in range(1797) if number % 50 < 40]
    for dataset, numbers in ((train, rest), (validation, held_out)):
        assert dataset.labels.tolist() == digits.target[numbers].tolist()
        assert torch.equal(dataset.images.double(), torch.from_numpy(digits.images[numbers] / 8 - 1).unsqueeze(1))
        assert set(dataset.labels.tolist()) == set(range(10))


def test_a_language_model_takes_no_images(splits: Any) -> None:
    config = load_config(dict(model=dict(type="GPT"), data=dict(type="Digits")), nproc=1)
    with pytest.raises(
        ConfigError, match=r"sample 0 of Digits has inputs of torch.float32, but the model takes token ids"
    ):
        check_data(config)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["data.split=test"], "data.split: must be 'train' or 'validation', got 'test'"),
        (["data.split=[]"], "data.split: must be"),
        (["model.image_size=16"], r"data: sample 0 of Digits has shape \[1, 8, 8\], but .* say \[1, 16, 16\]"),
        (["model.in_channels=3"], r"say \[3, 8, 8\]"),
        (["model.num_classes=9"], r"sample 9 of Digits has the label 9, but model.num_classes = 9 \(labels 0..8\)"),
        (["data.type=PythonStdlib", "data.seq_len=8"], r"sample 0 of PythonStdlib has shape \[8\], but"),
    ],
)
def test_what_is_refused_before_launch(overrides: list[str], words: str, splits: Any) -> None:
    with pytest.raises(ConfigError, match=words):
        check_data(load_config(CONFIG, overrides, nproc=2))
