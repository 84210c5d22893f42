"""The words model in plain torch, under torch's DistributedDataParallel.

The same layers, sample of negatives and optimizer as `colossus.sparse.words_model.WordsLM` with an LSTM; what a user
would write who knows torch well. Tables are `torch.nn.Embedding`, with dense gradients or with sparse=True.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel

from colossus.context.rng_streams import RngStreams
from colossus.sparse import sampled_softmax as log_uniform


class PlainWords(nn.Module):
    """inputs dict(ids, pairs) or ids, labels: [batch, tokens] -> sum of the sampled losses."""

    def __init__(self, model: dict[str, Any], *, sparse: bool) -> None:
        super().__init__()
        width, vocabulary, pairs = model["hidden_size"], model["vocab_size"], model["pairs"]
        self.num_samples, self.vocabulary, self._rng = model["num_samples"], vocabulary, RngStreams(0)
        self.embedding = nn.Embedding(vocabulary, width, sparse=sparse)
        self.pairs = nn.Embedding(pairs, width, sparse=sparse) if pairs else None
        self.lstm = nn.LSTM(width, width, batch_first=True)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Embedding(vocabulary, width, sparse=sparse)
        self.head_bias = nn.Embedding(vocabulary, 1, sparse=sparse)

    def forward(self, inputs: Any, labels: Tensor, step: int) -> Tensor:
        x = self.embedding(inputs["ids"] if self.pairs is not None else inputs)
        if self.pairs is not None:
            x = x + self.pairs(inputs["pairs"])
        x = self.norm(x + self.lstm(x)[0]).flatten(0, 1)
        labels = labels.flatten()
        drawn = log_uniform.sample(self._rng.key("negatives", step, "head"), self.num_samples, self.vocabulary)
        negatives = torch.from_numpy(drawn.classes)
        own = (x * self.head(labels)).sum(-1) + self.head_bias(labels).squeeze(1) - _log(drawn, labels)
        others = F.linear(x, self.head(negatives), self.head_bias(negatives).squeeze(1)) - _log(drawn, negatives)
        others = others.masked_fill(labels.unsqueeze(1) == negatives, float("-inf"))
        return -F.logsigmoid(own - others.logsumexp(1)).sum()


def _log(drawn: log_uniform.LogUniformSample, classes: Tensor) -> Tensor:
    return torch.from_numpy(drawn.expected_count(classes.numpy())).log().float()


class WordsDDP:
    """One rank of a run, one step at a time.

    Args:
        model, optimizer: the sections of the config.
        start: the initial values, those of `WordsLM`.
        sparse: whether the tables' gradients are sparse.

    Attributes:
        table_bytes: bytes of this rank's tables and their optimizer state.
    """

    def __init__(
        self, model: dict[str, Any], optimizer: dict[str, Any], start: dict[str, Tensor], *, sparse: bool
    ) -> None:
        words = PlainWords(model, sparse=sparse)
        own_names = {"head.bias": "head_bias.weight"}
        words.load_state_dict({own_names.get(name, name): value for name, value in start.items()})
        self._model = DistributedDataParallel(words, gradient_as_bucket_view=not sparse)
        self._optimizer = torch.optim.Adagrad(self._model.parameters(), lr=optimizer["lr"])
        self._step = 0
        tables = [module for module in self._model.modules() if isinstance(module, nn.Embedding)]
        self.table_bytes = 2 * sum(table.weight.nbytes for table in tables)

    def step(self, batch: dict[str, Any]) -> float:
        """Train on a batch and return the loss of a word of the global batch."""
        self._optimizer.zero_grad()
        count = batch["labels"].numel() * dist.get_world_size()
        loss = self._model(batch["inputs"], batch["labels"], self._step) * (dist.get_world_size() / count)
        loss.backward()  # DDP takes the mean over ranks
        self._optimizer.step()
        self._step += 1
        total = loss.detach() / dist.get_world_size()
        dist.all_reduce(total)
        return total.item()
