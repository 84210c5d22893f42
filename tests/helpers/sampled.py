"""A sampled softmax in plain torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from colossus.context.rng_streams import RngStreams
from colossus.sparse import sampled_softmax as log_uniform
from colossus.sparse.sampled_softmax import LogUniformSample


def drawn_in(step: int, num_samples: int, num_classes: int, *, seed: int = 0, name: str = "head") -> LogUniformSample:
    """What a layer of this name draws in a step."""
    return log_uniform.sample(RngStreams(seed).key("negatives", step, name), num_samples, num_classes)


def sampled_loss(x: Tensor, labels: Tensor, weight: Tensor, bias: Tensor, drawn: LogUniformSample) -> Tensor:
    """Sum over the tokens with a label >= 0: a softmax over the label and the sample, logits less log expected count.

    x [.., hidden], labels [..], weight [classes, hidden], bias [classes, 1].
    """
    classes = len(weight)
    x, labels = x.flatten(0, -2), labels.flatten()
    x, labels = x[labels >= 0], labels[labels >= 0]
    log_counts = torch.from_numpy(drawn.expected_count(torch.arange(classes).numpy())).log().to(x.dtype)
    logits = x @ weight.t() + bias.squeeze(1) - log_counts
    sampled = torch.zeros(classes, dtype=torch.bool).index_fill(0, torch.from_numpy(drawn.classes), True)
    kept = sampled | F.one_hot(labels, classes).bool()
    return F.cross_entropy(logits.masked_fill(~kept, float("-inf")), labels, reduction="sum")
