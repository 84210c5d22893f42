"""The gated delta rule (2412.06464) by chunks: a state that queries read and keys correct, and its affine maps.

A head has a state S [key_dim, value_dim]. Token t makes of it, and reads,

    S' = exp(g_t) S;    S_t = S' + beta_t k_t (v_t - k_t^T S')^T;    o_t = S_t^T q_t

Within a chunk all of that is products of matrices (2406.06484): S_end = A S + B, with A and B of the chunk alone. So
the tokens of a *segment*, chunk after chunk, are an affine map of the state before them, too, and segments that lie on
several ranks compose: `prefix_states`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class DeltaChunks:
    """The products of each chunk that need no state, for [.., chunks, C tokens, features].

    For a state S before the chunk: new = values - corrections S; the outputs are reads S + within new, and the state
    behind it is decay S + writes^T new.

    Attributes:
        reads: the queries, decayed since the start of the chunk, [.., chunks, C, key_dim].
        within: scores of the tokens of a chunk with each other, [.., chunks, C, C].
        values: [.., chunks, C, value_dim].
        corrections: [.., chunks, C, key_dim].
        writes: the keys, decayed until the end of the chunk, [.., chunks, C, key_dim].
        decay: the decay of the state over the chunk, [.., chunks, 1, 1].
        length: tokens without padding.
    """

    reads: Tensor
    within: Tensor
    values: Tensor
    corrections: Tensor
    writes: Tensor
    decay: Tensor
    length: int

    @staticmethod
    def of(
        query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, beta: Tensor, starts: Tensor | None, size: int
    ) -> DeltaChunks:
        """Return the chunks of tokens.

        Args:
            query, key: [.., tokens, key_dim]; the queries are scaled.
            value: [.., tokens, value_dim].
            log_decay: g, at most 0, [.., tokens].
            beta: the share of a correction, 0 to 1, [.., tokens].
            starts: True where a document starts, [.., tokens]: it finds an empty state; None: nowhere.
            size: tokens of a chunk.
        """
        length = query.shape[-2]
        size = min(size, length)
        missing = -length % size

        def chunked(x: Tensor) -> Tensor:
            return F.pad(x, (0, 0, 0, missing)).unflatten(-2, (-1, size))

        query, key, value = map(chunked, (query, key, value))
        log_decay, beta = (chunked(x.unsqueeze(-1)).squeeze(-1) for x in (log_decay, beta))
        total = log_decay.cumsum(-1)
        is_later = torch.ones(size, size, dtype=torch.bool, device=query.device).triu(1)
        pairs = (total.unsqueeze(-1) - total.unsqueeze(-2)).masked_fill(is_later, float("-inf")).exp()
        since_start, until_end, over_all = total.exp(), (total[..., -1:] - total).exp(), total[..., -1].exp()
        if starts is not None:
            number = chunked(starts.unsqueeze(-1).long()).squeeze(-1).cumsum(-1)  # of the document within the chunk
            pairs = pairs * (number.unsqueeze(-1) == number.unsqueeze(-2))
            since_start, until_end = since_start * (number == 0), until_end * (number == number[..., -1:])
            over_all = over_all * (number[..., -1] == 0)
        own = key * beta.unsqueeze(-1)
        system = (own @ key.mT) * pairs  # unit lower triangular: its diagonal is not read
        right = torch.cat((value * beta.unsqueeze(-1), own * since_start.unsqueeze(-1)), -1)
        solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
        values, corrections = solved.split((value.shape[-1], key.shape[-1]), -1)
        reads, writes = query * since_start.unsqueeze(-1), key * until_end.unsqueeze(-1)
        return DeltaChunks(
            reads, (query @ key.mT) * pairs, values, corrections, writes, over_all[..., None, None], length
        )

    def affine(self) -> Tensor:
        """Return the map of the state over all chunks, (A, B) side by side: [.., key_dim, key_dim + value_dim]."""
        size = self.writes.shape[-1]
        identity = torch.eye(size, dtype=self.writes.dtype, device=self.writes.device)
        whole = F.pad(identity, (0, self.values.shape[-1])).expand(*self.writes.shape[:-3], -1, -1)
        for chunk in range(self.decay.shape[-3]):
            new = F.pad(self.values[..., chunk, :, :], (size, 0)) - self.corrections[..., chunk, :, :] @ whole
            whole = whole * self.decay[..., chunk, :, :] + self.writes[..., chunk, :, :].mT @ new
        return whole

    def outputs(self, state: Tensor | None) -> Tensor:
        """Return the outputs [.., tokens, value_dim], from a state before the first token; None: an empty one."""
        if state is None:
            shape = (*self.writes.shape[:-3], self.writes.shape[-1], self.values.shape[-1])
            state = self.values.new_zeros(shape)
        out = []
        for chunk in range(self.decay.shape[-3]):
            new = self.values[..., chunk, :, :] - self.corrections[..., chunk, :, :] @ state
            out.append(self.reads[..., chunk, :, :] @ state + self.within[..., chunk, :, :] @ new)
            state = state * self.decay[..., chunk, :, :] + self.writes[..., chunk, :, :].mT @ new
        return torch.cat(out, -2)[..., : self.length, :]


def prefix_states(maps: Tensor, order: Sequence[int], own: Sequence[int]) -> Tensor:
    """Return the states before some of a sequence's segments, [len(own), .., key_dim, value_dim].

    Args:
        maps: of all segments, (A, B) of `DeltaChunks.affine`: [segments, .., key_dim, key_dim + value_dim].
        order: the numbers of the segments in the order of their tokens.
        own: the numbers of the segments whose states are returned, in this order.
    """
    size = maps.shape[-2]
    states = [maps.new_zeros((*maps.shape[1:-1], maps.shape[-1] - size))]
    for number in order[:-1]:
        matrix, addend = maps[number].split((size, maps.shape[-1] - size), -1)
        states.append(matrix @ states[-1] + addend)
    # an index of all: the first rank's state is empty, but its backward takes part in the sum of gradients, too
    place = {number: place for place, number in enumerate(order)}
    return torch.stack(states)[[place[number] for number in own]]
