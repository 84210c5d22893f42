"""How often the right class is among the highest logits, over a vocabulary that may be split."""

from __future__ import annotations

import torch
from torch import Tensor

from colossus.comm import collectives
from colossus.layers.loss.split_logits import local_logits_and_labels
from colossus.sharded_tensor.regions import local


@torch.no_grad()
def accuracy(logits: Tensor, labels: Tensor, *, k: int = 1, ignore_index: int = -100) -> tuple[Tensor, Tensor]:
    """Number of valid tokens whose label is among the ``k`` highest logits, and the number of valid tokens.

    The logits are never gathered: a label is right when fewer than k columns are higher than its own. Of equal logits
    the one with the lower index counts as higher, as in ``torch.argmax``.

    Args:
        logits: [.., vocabulary], plain or with split features.
        labels: [..] in 0..vocabulary-1, or ``ignore_index``; in the whole layout.

    Returns:
        (correct, count): float64 scalars over the samples this rank holds in the whole layout; sum them over the ranks
        that hold other samples.
    """
    labels = local(labels)
    count = (labels != ignore_index).sum().double()
    split, labels = local_logits_and_labels(logits, labels)
    columns = split.local[..., : split.stop - split.start]
    valid = labels != ignore_index
    is_local = (labels >= split.start) & (labels < split.stop) & valid
    column = (labels - split.start).masked_fill_(~is_local, 0).unsqueeze(-1)
    if columns.shape[-1]:
        target = columns.gather(-1, column).squeeze(-1).masked_fill_(~is_local, 0.0)
    else:  # a rank that holds only padding
        target = torch.zeros(labels.shape, dtype=columns.dtype, device=columns.device)
    if split.group is not None:
        target = collectives.all_reduce(target, split.group, owned=True).wait()
    target = target.unsqueeze(-1)
    index = torch.arange(split.start, split.stop, device=labels.device)
    # NaN counts as higher: a model that gives NaN is never right
    above = ~(columns <= target) | ((columns == target) & (index < labels.unsqueeze(-1)))
    higher = above.sum(-1).double()
    if split.group is not None:
        higher = collectives.all_reduce(higher, split.group, owned=True).wait()
    correct = ((higher < k) & valid).sum().double()
    return split.to_whole_sum(correct), count
