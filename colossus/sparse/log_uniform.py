"""Log-uniform (Zipfian) samples of classes, as TensorFlow's ``log_uniform_candidate_sampler`` draws them. No torch.

Class k of n has the probability log((k + 2) / (k + 1)) / log(n + 1): right for classes in the order of falling
frequency.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class LogUniformSample:
    """Different classes, and how they were drawn.

    Attributes:
        classes: int64 [n], in the order in which they were drawn.
        num_classes: of which.
        num_draws: how many draws gave them; those that came again were left out.
    """

    classes: np.ndarray
    num_classes: int
    num_draws: int

    def expected_count(self, classes: Any, xp: Any = np) -> Any:
        """How often a class is expected in such a sample, of the shape of ``classes``; see `probability`.

        1 - (1 - p) ** draws (TensorFlow's "candidate sampling algorithms").
        """
        return -xp.expm1(self.num_draws * xp.log1p(-probability(classes, self.num_classes, xp)))


def probability(classes: Any, num_classes: int, xp: Any = np) -> Any:
    """Of drawing each class, of the shape of ``classes``: an array, or a tensor of float64 where ``xp`` is torch."""
    return xp.log1p(1.0 / (classes + 1.0)) / math.log(num_classes + 1.0)


def sample(key: int, num_samples: int, num_classes: int) -> LogUniformSample:
    """Draw until there are ``num_samples`` different classes; the same on every machine for the same key."""
    assert num_samples <= num_classes
    generator = np.random.Generator(np.random.Philox(key))
    drawn = np.empty(0, dtype=np.int64)
    while True:
        values = np.exp(generator.random(len(drawn) or 2 * num_samples) * math.log(num_classes + 1.0))
        fresh = np.clip(values.astype(np.int64) - 1, 0, num_classes - 1)  # rounding at the ends
        drawn = np.concatenate((drawn, fresh))
        first = np.sort(np.unique(drawn, return_index=True)[1])
        if len(first) >= num_samples:
            first = first[:num_samples]
            return LogUniformSample(drawn[first], num_classes, int(first[-1]) + 1)
