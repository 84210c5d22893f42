"""Images that need no download."""

from __future__ import annotations

import numpy as np
import torch

from colossus.data.tokens import SPLITS, BatchedDataset

#: the last 10 of every 50 scans are held out, so that all writers and all digits are in both splits
_BLOCK, _HELD_OUT = 50, 10


class Digits(BatchedDataset):
    """Handwritten digits: 1,797 scans of 8 x 8 pixels in 17 shades (UCI, "Optical Recognition of Handwritten Digits").

    They are a part of scikit-learn (``pip install colossus[images]``). The last 10 of every 50 scans are held out:
    1,440 for training, 357 for validation, with all writers and all digits in both.

    Args:
        split: ``"train"`` or ``"validation"``.

    Shape:
        A sample is ``inputs`` [1, 8, 8], float32 from -1 (paper) to 1 (ink), and ``labels``, 0 to 9.

    Raises:
        ValueError: without scikit-learn, and for another split.
    """

    num_classes = 10

    def __init__(self, split: str = "train") -> None:
        if split not in SPLITS:
            raise ValueError(f"Digits: split = {split!r} is not one of {', '.join(map(repr, SPLITS))}")
        try:
            from sklearn.datasets import load_digits
        except ImportError as error:
            raise ValueError(
                "Digits is a part of scikit-learn, which is not installed: pip install 'colossus[images]'"
            ) from error
        pixels, labels = load_digits(return_X_y=True)
        is_held_out = np.arange(len(labels)) % _BLOCK >= _BLOCK - _HELD_OUT
        part = is_held_out if split == "validation" else ~is_held_out
        self.name = f"Digits ({split})"
        self.images = torch.from_numpy((pixels[part] / 8.0 - 1.0).astype(np.float32)).view(-1, 1, 8, 8)
        self.labels = torch.from_numpy(labels[part].astype(np.int64))

    def __len__(self) -> int:
        return len(self.labels)

    def batch(self, indices: np.ndarray) -> dict[str, torch.Tensor]:
        """Return ``inputs`` [b, 1, 8, 8] and ``labels`` [b] of samples ``indices`` [b]."""
        at = torch.from_numpy(np.asarray(indices, dtype=np.int64))
        return {"inputs": self.images[at], "labels": self.labels[at]}

    def describe(self) -> str:
        """Return one line for logs."""
        return f"{self.name}: {len(self):,} images of 1 x 8 x 8"
