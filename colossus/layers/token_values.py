"""Values of tokens (a loss, a log-probability) from their logits, which ranks may split, or never have all at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from colossus.comm.autograd import first_order
from colossus.comm.kept_results import kept
from colossus.context.groups import AxisGroup
from colossus.context.parallel_context import ParallelContext, current_context
from colossus.error_place import located_error
from colossus.layout.activation import Activation
from colossus.sharded_tensor.placement import HasRegions
from colossus.sharded_tensor.regions import as_aligned, local, sequence_place, unwrap
from colossus.sharded_tensor.tensor import ShardedTensor
from colossus.sharded_tensor.token_collectives import sum_over_ranks
from colossus.tensor_parallel.move_plan import MovePlan, run
from colossus.tensor_parallel.tiled_products import num_leaves


@dataclass(frozen=True)
class LogitsLayout:
    """The rows and columns of the logits that a rank has.

    Attributes:
        group: the ranks over which the columns are split; None if the rank has all.
        start, stop: the rank's columns, of ``total``; columns behind the first ``stop - start`` are padding.
        leaves: parts of one size into which the columns are cut for sums over them, see
            `colossus.tensor_parallel.tiled_products`.
        to_rows, to_samples: moves of one number a token from the whole layout to the rank's rows and back; None where
            these are the same. In 3D the rank's rows are not those of its samples.
    """

    group: AxisGroup | None
    start: int
    stop: int
    total: int
    leaves: int = 1
    to_rows: MovePlan | None = None
    to_samples: MovePlan | None = None

    @classmethod
    def of(
        cls, activation: Activation, parallel: HasRegions, ndim: int, width: int, total: int | None = None
    ) -> LogitsLayout:
        """Return the layout of logits of ``ndim`` dims of which a rank has ``width`` columns.

        Args:
            total: size of the vocabulary, if the last shards may be padded.
        """
        context, whole = parallel.context, parallel.regions.whole
        group = context.group(activation.features)
        total = total or width * group.size
        start = min(group.index * width, total)
        to_rows = MovePlan.of_tokens(whole, activation, ndim, context)
        to_samples = MovePlan.of_tokens(activation, whole, ndim, context)
        plans = (to_rows, to_samples) if to_rows.forward else (None, None)
        return cls(group, start, min(start + width, total), total, _num_leaves(context, total, group.size), *plans)

    @classmethod
    def whole(cls, total: int) -> LogitsLayout:
        """Return the layout of logits of which the rank has all ``total`` columns, and all rows."""
        return cls(None, 0, total, total, _num_leaves(current_context(), total, 1))

    def rows_of(self, x: Tensor) -> Tensor:
        """Return a number of each token, [..], of the rank's rows, from the whole layout; without a gradient."""
        plan = self.to_rows
        return x if plan is None else kept("the labels of tokens", lambda: run(plan.forward, x).wait())

    def samples_of(self, values: Tensor) -> Tensor:
        """Return the values of the rank's own samples, [..] in the whole layout, from those of its rows."""
        if self.to_samples is None or self.to_rows is None:
            return values
        moved: Tensor = _ToSamples.apply(values, self.to_samples, self.to_rows)
        return moved


class _ToSamples(torch.autograd.Function):
    """Values of tokens moved to the ranks of their samples; their gradient, complete on each rank, moves back."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, plan: MovePlan, back: MovePlan) -> Tensor:
        ctx.back = back
        return kept("the values of tokens", lambda: run(plan.forward, values).wait())

    @staticmethod
    @first_order
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return run(ctx.back.forward, grads[0]).wait(), None, None


def _num_leaves(context: ParallelContext, total: int, ranks: int) -> int:
    return num_leaves((total,), ranks, "a vocabulary") if context.options.reproducible else 1


class SplitLogits(NamedTuple):
    """One rank's rows and columns of the logits, [.., columns], and their `LogitsLayout`."""

    local: Tensor
    layout: LogitsLayout


class ChunkedLogits(NamedTuple):
    """The input of a head whose logits are made a chunk of tokens at a time, by the losses that take it.

    Attributes:
        hidden: [batch, tokens, features], as the head takes it.
        head: a `colossus.layers.LMHead`.
        chunk: the most rows (samples x tokens) of the logits that a rank has at a time; one token of each sample at
            least.
        cap: bound of the logits, as ``logit_cap`` of the models; None: none.
    """

    hidden: Tensor
    head: Any
    chunk: int
    cap: float | None = None

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"with model.loss_chunk the logits are made in chunks, by the losses of colossus.layers: they have no "
            f"{name!r}; a loss of your own takes them with loss_chunk=None"
        )

    @property
    def product(self) -> tuple[Tensor, int, float | None]:
        """Arguments of `colossus.layers.LMHead.product_of`."""
        return self.hidden, self.chunk, self.cap


Logits = Tensor | ChunkedLogits
#: (logits of some tokens, local logits of another model for them if there is one, then a tensor [..] for each of
#: ``tokens``) -> values of these tokens, [..]
TokenFunction = Callable[..., Tensor]


class InChunks(NamedTuple):
    """The arguments of `token_values` as the input of a head, which makes the logits."""

    function: TokenFunction
    logits: ChunkedLogits
    tokens: tuple[Tensor, ...]
    other: Logits | None


def token_values(function: TokenFunction, logits: Logits, *tokens: Tensor, other: Logits | None = None) -> Tensor:
    """Return a value of each token, [..], computed from its logits; of this rank's samples, in the whole layout.

    The values and their gradient are the same on all ranks with the same samples. With `ChunkedLogits` the function is
    called for a chunk of tokens at a time, and again in the backward.

    Args:
        function: see `TokenFunction`.
        logits: [.., vocabulary], plain, with split features, or in chunks.
        tokens: numbers of each token, [..], plain, in the whole layout; see `aligned_tokens`.
        other: logits of another model for the same tokens, without a gradient.

    Raises:
        ValueError: shapes do not fit.
    """
    if isinstance(logits, ChunkedLogits):
        values: Tensor = logits.head(InChunks(function, logits, tokens, other))
        return values
    shard, layout = split_logits(logits)
    rows = rows_of_tokens(shard, layout, tokens)
    if other is None:
        return layout.samples_of(function(SplitLogits(shard, layout), *rows))
    if isinstance(other, ChunkedLogits):
        raise located_error(
            "the logits of the other model come in chunks, but those of the model do not: give both the same loss_chunk"
        )
    its_logits, its_layout = split_logits(other.detach())
    require_same_vocabulary(layout, its_layout)
    return layout.samples_of(function(SplitLogits(shard, layout), its_logits, *rows))


def rows_of_tokens(logits: Tensor, layout: LogitsLayout, tokens: Sequence[Tensor]) -> list[Tensor]:
    """Return numbers of each token of the rank's rows, from the whole layout.

    Raises:
        ValueError: they do not fit the rank's logits, or any tensor [.., features] in the layout of their rows.
    """
    rows = [layout.rows_of(x) if x.dim() == logits.dim() - 1 else x for x in tokens]
    require_rows(tokens, rows, logits)
    return rows


def require_rows(tokens: Sequence[Tensor], rows: Sequence[Tensor], logits: Tensor) -> None:
    """Raise ValueError unless numbers of tokens, as a rank's rows have them, fit its logits [.., features]."""
    for x, own in zip(tokens, rows, strict=True):
        if own.shape != logits.shape[:-1]:
            raise located_error(
                f"labels have shape {tuple(x.shape)}, logits {tuple(logits.shape)}: all dims but the last must agree"
            )


def aligned_tokens(logits: Logits, *tokens: Tensor) -> tuple[Callable[[Tensor], Tensor], list[Tensor]]:
    """Return a function that sums over all tokens, and this rank's numbers of the tokens whose logits it has, plain.

    The function takes any tensor of sums of this rank's tokens, and returns those of all sequence ranks.
    """
    hidden = logits.hidden if isinstance(logits, ChunkedLogits) else logits
    split = next((x for x in (hidden, *tokens) if sequence_place(x) is not None), None)
    if split is None:
        return lambda total: total, [local(x) for x in tokens]
    parallel = split.placement.parallel  # type: ignore[attr-defined]
    if (place := sequence_place(hidden)) is not None:
        tokens = tuple(x if sequence_place(x) is None else as_aligned(x, place, parallel) for x in tokens)

    def over_tokens(total: Tensor) -> Tensor:  # in as many digits as the engine adds up ranks in
        return sum_over_ranks(total.double() if total.is_floating_point() else total, parallel)

    return over_tokens, [local(x) for x in tokens]


def require_same_vocabulary(own: LogitsLayout, other: LogitsLayout) -> None:
    """Raise ValueError unless two models have the same vocabulary, split alike."""
    if own.total != other.total:
        raise located_error(
            f"two models are compared token by token, but one has a vocabulary of {own.total}, the other one of "
            f"{other.total}: take two with the same tokenizer"
        )
    assert (own.start, own.stop) == (other.start, other.stop), "vocabularies are split alike"


def split_logits(logits: Tensor) -> tuple[Tensor, LogitsLayout]:
    """Return a rank's part of the logits as a plain tensor, and its layout."""
    if isinstance(logits, ShardedTensor) and logits.placement.is_whole:
        logits, _ = unwrap(logits, logits.placement.parallel)
    if not isinstance(logits, ShardedTensor):
        return logits, LogitsLayout.whole(logits.shape[-1])
    parallel = logits.placement.parallel
    shard, placement = unwrap(logits, parallel)
    width, total = shard.shape[-1], placement.num_features
    return shard, LogitsLayout.of(placement.activation, parallel, shard.dim(), width, total)
