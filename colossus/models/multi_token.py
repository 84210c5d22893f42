"""Multi-token prediction (2412.19437, section 2.2): one more block predicts the token after the next in training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from colossus.comm import collectives
from colossus.construct.initial_values import Normal
from colossus.context.parallel_context import current_context
from colossus.layers.layer import call
from colossus.layers.linear import Linear
from colossus.layers.model_parallel import ModelParallel, model_parallel_of, to_residual
from colossus.layers.token_values import Logits
from colossus.sharded_tensor.regions import to_whole

#: label that losses ignore
IGNORED = -100
#: keys of a batch: the tokens after those of ``ids``, their labels, and the numbers of labels in the whole step
NEXT_IDS, NEXT_LABELS, NUM_LABELS, NUM_NEXT_LABELS = "next_ids", "next_labels", "num_labels", "num_next_labels"
#: weights of the losses of labels, which a batch may have, and of next labels
TOKEN_WEIGHTS, NEXT_WEIGHTS = "token_weights", "next_weights"


class Further(NamedTuple):
    """The logits of the next token, and of the token after it."""

    next: Logits
    after_next: Logits


class NextToken(nn.Module):
    """A block on the last activation of a decoder and the embedding of each next token; the decoder's head follows.

        x = join([norm(embedding of the next token), norm(hidden)]), then norm(block(x))

    Args:
        hidden_size: features of both.
        block: the transformer block.
        norms: the norms of embedding, hidden and output.
        init: initial values of ``join``.

    Shape:
        hidden, embedded and output [batch, tokens, hidden_size].
    """

    def __init__(self, hidden_size: int, block: nn.Module, norms: tuple[nn.Module, nn.Module, nn.Module], init: Normal):
        super().__init__()
        self.parallel = model_parallel_of(current_context())
        self.embedding_norm, self.hidden_norm, self.norm = norms
        self.join = Linear(2 * hidden_size, hidden_size, bias=False, init=init)
        self.block = block

    def forward(self, hidden: Tensor, embedded: Tensor, documents: Tensor | None = None) -> Tensor:
        embedded = call(self.embedding_norm, embedded, self.parallel)
        hidden = call(self.hidden_norm, hidden, self.parallel)
        both = torch.cat((to_whole(embedded), to_whole(hidden)), -1)
        x = to_residual(call(self.join, both, self.parallel), self.parallel)
        x = call(self.block, x, self.parallel, documents=documents)
        y: Tensor = call(self.norm, x, self.parallel)
        return y


def with_next_tokens(batch: Mapping[str, Any], parallel: ModelParallel) -> dict[str, Any]:
    """Return a data rank's batch of a step with the next token of each token and its label. Collective over data.

    They are taken from whole sequences, before these are split. No document reaches into the next one. The last token
    has no label, so that its next one does not matter. The numbers of labels are those of all data ranks; with weights
    of tokens they are sums of weights.

    Args:
        batch: inputs, ids [batch, tokens] or dict(ids=.., documents=..), labels [batch, tokens], and maybe
            token_weights [batch, tokens].
    """
    inputs, labels = batch["inputs"], batch["labels"]
    inputs = dict(inputs) if isinstance(inputs, Mapping) else {"ids": inputs}
    next_labels = F.pad(labels[:, 1:], (0, 1), value=IGNORED)
    if (documents := inputs.get("documents")) is not None:
        ends = F.pad(documents[:, 1:] != documents[:, :-1], (0, 1), value=True)
        next_labels = next_labels.masked_fill(ends, IGNORED)
    more: dict[str, Any] = {NEXT_LABELS: next_labels}
    counted = [labels != IGNORED, next_labels != IGNORED]
    if (weights := batch.get(TOKEN_WEIGHTS)) is not None:
        more[NEXT_WEIGHTS] = F.pad(weights[:, 1:], (0, 1))
        counted = [weights.double() * counted[0], more[NEXT_WEIGHTS].double() * counted[1]]
    counts = torch.stack([x.sum() for x in counted])
    if not parallel.replicas_differ:
        context = parallel.context
        counts = collectives.all_reduce(counts.to(context.device), context.group("data"), what="labels").wait()
    inputs[NEXT_IDS] = F.pad(inputs["ids"][:, 1:], (0, 1))
    return {**batch, "inputs": inputs, **more, NUM_LABELS: counts[0], NUM_NEXT_LABELS: counts[1]}


def added_loss(main: Tensor, further: Tensor, weight: float, batch: Mapping[str, Tensor]) -> Tensor:
    """Return the sum of the losses of next tokens with the gradient of both losses, each over its own mean.

    The engine divides by the number of labels of the step, so the other sum is multiplied by it over its own number.
    The value stays that of the next tokens, as in an evaluation.
    """
    number = batch[NUM_NEXT_LABELS].double()
    share = batch[NUM_LABELS].double() / torch.where(number > 0, number, 1.0)
    term = further * (weight * share).to(further.dtype)
    return main + (term - term.detach())
