"""Batches of a config's data of which only shapes and dtypes count."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

from colossus.config import Config
from colossus.data.batch import batch_size_of, map_batch
from colossus.data.make_loaders import loaders_of


def sample_of(config: Config) -> Any:
    """Return a batch of one sample of the config's data; only its shapes and dtypes count.

    A ``collate_fn`` may make several rows of a sample.
    """
    train = config.train.model_copy(update={"global_batch_size": 1, "batch_ramp": None, "tokens_per_microbatch": None})
    one_sample = config.model_copy(update={"train": train})
    batch = next(iter(loaders_of(one_sample, config.data, data_rank=0, data_size=1, device="cpu").train))
    size = batch_size_of(batch)
    if getattr(config.data, "options", {}).get("collate_fn") is not None:
        return batch
    return map_batch(lambda x: x[:1] if x.dim() and len(x) == size else x, batch)


def repeated(sample: Any, size: int) -> Any:
    """Return a batch of ``size`` copies of a sample."""
    rows = batch_size_of(sample)

    def repeat(x: Tensor) -> Tensor:
        return x.unsqueeze(0).expand(size, *x.shape).flatten(0, 1) if rows > 1 else x.expand(size, *x.shape[1:])

    return map_batch(lambda x: repeat(x) if x.dim() and len(x) == rows else x, sample)


def counted_of(batch: Any) -> int:
    """Return the number that the loss counts for a sample: the integer labels in the batch, or 1.

    The labels are the entry ``labels`` or else the last tensor.
    """
    labels = batch["labels"] if isinstance(batch, dict) and "labels" in batch else None
    if labels is None:
        labels = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.dim()][-1]
    return 1 if labels.is_floating_point() else labels.numel()
