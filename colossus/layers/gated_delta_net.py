"""Gated DeltaNet (2412.06464): attention by a state in place of keys and values, as in Qwen3-Next."""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from colossus.arithmetic import not_a_multiple
from colossus.comm import collectives
from colossus.comm.conjugate import conjugate
from colossus.comm.kept_results import kept
from colossus.construct.initial_values import Constant, torch_linear, uniform_box
from colossus.error_place import located_error
from colossus.layers.head_attention import local_documents
from colossus.layers.layer import Layer, call
from colossus.layers.linear import Linear
from colossus.layers.norm import RMSNorm
from colossus.layout.layout import Box, Layout
from colossus.layout.parameter import Initializer
from colossus.sequence_parallel.delta_rule import DeltaChunks, prefix_states
from colossus.sequence_parallel.split import Segments
from colossus.sharded_tensor.placement import placement_of
from colossus.sharded_tensor.regions import require_sequences
from colossus.sharded_tensor.tensor import plain, wrap

_TOKENS = 1


@dataclass(frozen=True)
class LogUniform:
    """The logarithm of uniforms in (low, high)."""

    low: float
    high: float

    def __call__(self, key: int, shape: tuple[int, ...], box: Box) -> Any:
        return torch.from_numpy(uniform_box(key, shape, box) * (self.high - self.low) + self.low).log().numpy()


class GatedDeltaNet(Layer):
    """Linear attention: a head's state is read by queries, and corrected by keys and values, token after token.

        q, k, v         = silu(conv(q, k, v of x)), a causal convolution of each feature; q and k with length 1
        beta, decay     = sigmoid(b of x), exp(-exp(A_log) softplus(a of x + dt_bias)), for each head
        S, o            = see `colossus.sequence_parallel.delta_rule`
        y               = out(norm(o) * silu(gate of x))

    Time and memory are linear in the tokens. Tensor ranks split the heads. Under ``parallel.sequence`` a rank computes
    the map of the state over its tokens, all ranks gather these maps, [key_dim, key_dim + value_dim] for each head and
    run of tokens, and each composes those before its own; the convolution takes ``kernel_size - 1`` tokens of the
    run before.

    Shape:
        input and output [batch, tokens, hidden_size]. ``documents`` [batch, tokens]: where the number changes, a
        document starts with an empty state. Parameters, by full shapes: ``qkv.query.weight`` and so on for ``key``,
        ``value``, ``gate``, ``beta`` and ``decay``; ``conv_query``, ``conv_key`` and ``conv_value``
        [features, kernel_size]; ``A_log`` and ``dt_bias`` [num_heads]; ``norm.weight`` [value_dim]; ``out.weight``.

    Args:
        num_heads: heads of values, each with a state.
        num_key_heads: heads of queries and keys, which serve num_heads / num_key_heads of values each; by default as
            many.
        kernel_size: tokens of the convolution, itself included.
        chunk: tokens of which the products are made at once.
        norm_eps: epsilon of ``norm``.

    Raises:
        ValueError: the key heads do not divide the heads, or the tensor ranks one of both.
    """

    takes_plain_parameters = True

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_key_heads: int | None = None,
        *,
        key_dim: int = 128,
        value_dim: int = 128,
        kernel_size: int = 4,
        chunk: int = 64,
        norm_eps: float = 1e-6,
        init: Initializer | None = None,
        out_init: Initializer | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        num_key_heads = operator.index(num_key_heads or num_heads)
        self.num_heads, self.num_key_heads = operator.index(num_heads), num_key_heads
        self.key_dim, self.value_dim, self.kernel_size, self.chunk = key_dim, value_dim, kernel_size, chunk
        inner = self.parallel.regions.inner
        ways = self.context.size(inner.features) if inner.features else 1
        if num_heads % num_key_heads:
            raise located_error(
                f"GatedDeltaNet: num_key_heads = {num_key_heads} does not divide num_heads = {num_heads}"
            )
        for name in ("num_heads", "num_key_heads"):
            if getattr(self, name) % ways:
                by = f"{ways}, the ranks of {' x '.join(inner.features)}"
                raise located_error(f"GatedDeltaNet: {not_a_multiple(name, getattr(self, name), by, ways)}")
        keys, values = num_key_heads * key_dim, num_heads * value_dim
        qkv = {"query": keys, "key": keys, "value": values}
        more = {"gate": values, "beta": num_heads, "decay": num_heads}
        self.qkv = Linear(hidden_size, qkv | more, False, dtype=dtype, split="column", init=init)
        by_head, by_feature = Layout((inner.features,)), Layout((inner.features, ()))
        self.conv_query, self.conv_key, self.conv_value = (
            self.make_parameter({"": (size, kernel_size)}, by_feature, torch_linear(kernel_size), dtype=dtype)
            for size in qkv.values()
        )
        self.A_log = self.make_parameter({"": (num_heads,)}, by_head, LogUniform(0.01, 16.0), dtype=dtype)
        self.dt_bias = self.make_parameter({"": (num_heads,)}, by_head, Constant(1.0), dtype=dtype)
        for parameter in self.parameters(recurse=False):
            self.decide_gradients(parameter, inner)
        self.norm = RMSNorm(value_dim, norm_eps, dtype=dtype)
        self.out = Linear(values, hidden_size, False, dtype=dtype, split="row", init=out_init)

    def forward(self, x: Tensor, mask: Tensor | None = None, documents: Tensor | None = None) -> Tensor:
        require_sequences(x)
        if mask is not None or self.parallel.batch_info.cache is not None:
            refused = "a mask over keys" if mask is not None else "the cache of a model that decodes"
            raise located_error(
                f"{self.title}: {refused}, but its state has no keys: give packed or padded sequences documents "
                f"[batch, tokens], and let models generate with key_value_cache = False"
            )
        outputs = call(self.qkv, x, self.parallel, self.parallel.regions.inner, outputs=6)
        query, key, value, gate, beta, decay = map(plain, outputs)
        segments = self._segments(query.shape[_TOKENS])
        continues = None
        if documents is not None:
            continues = self._continues(local_documents(documents, self.parallel), segments)
        mixed = F.silu(self._convolved(torch.cat((query, key, value), -1), continues, segments))
        widths = (query.shape[-1], key.shape[-1], value.shape[-1])
        with torch.autocast(x.device.type, enabled=False):
            query, key, value = mixed.split(widths, -1)
            out = self._attended(query, key, value, beta, decay, continues, segments)
        placement = placement_of(outputs[2])
        merged = wrap(out.to(gate.dtype).flatten(-2), placement)
        heads = self.norm(merged.view((*merged.shape[:-1], -1, self.value_dim)))
        y: Tensor = call(self.out, wrap(plain(heads).flatten(-2) * F.silu(gate), placement), self.parallel)
        return y

    def _segments(self, tokens: int) -> Segments:
        """Return the runs of consecutive tokens of this rank and of the others."""
        sequence = self.parallel.sequence
        if sequence is None:
            return Segments(tokens, [0])
        segments = sequence.segments(tokens)
        if segments.length < self.kernel_size - 1:
            raise located_error(
                f"{self.title}: parallel.sequence cuts {tokens * sequence.num_shards} tokens into runs of "
                f"{segments.length}, fewer than the {self.kernel_size - 1} tokens before it that a convolution of "
                f"kernel_size = {self.kernel_size} reads"
            )
        return segments

    def _own(self, count: int) -> range:
        """Return the numbers of this rank's runs."""
        sequence = self.parallel.sequence
        first = 0 if sequence is None else self.context.index(sequence.axes) * count
        return range(first, first + count)

    def _with_before(self, runs: Tensor, reach: int, segments: Segments) -> Tensor:
        """Return runs with the entries of the ``reach`` tokens before each, zeros before the first.

        Args:
            runs: of this rank, [batch, runs, tokens, ..]; on other ranks of the sequence axis as many.
        """
        before = runs.new_zeros((*runs.shape[:2], reach, *runs.shape[3:]))
        sequence = self.parallel.sequence
        if sequence is None:
            return torch.cat((before, runs), 2)
        group, tails = self.context.group(sequence.axes), runs[:, :, -reach:]
        if runs.is_floating_point():
            gathered = conjugate(tails, "gather", "reduce_scatter", group, dim=1)
        else:
            gathered = kept("the last documents of runs", lambda: collectives.all_gather(tails, group, dim=1).wait())
        earlier = dict(pairwise(reversed(segments.order)))
        own = [earlier.get(number, len(segments.order)) for number in self._own(runs.shape[1])]
        # one index of a tensor: the first rank takes zeros, but its backward takes part in the sum, too
        padded = torch.cat((gathered, before[:, :1]), 1)
        return torch.cat((padded[:, own], runs), 2)

    def _continues(self, documents: Tensor, segments: Segments) -> Tensor:
        """Return where all from the token d before to a token are of one document: [batch, runs, d - 1, tokens].

        d goes from 1 to the reach of the convolution, or 1.
        """
        reach = max(1, self.kernel_size - 1)
        joined = self._with_before(documents.unflatten(_TOKENS, (-1, segments.length)), reach, segments)
        same = joined[..., 1:] == joined[..., :-1]
        steps = [same[..., reach - d : reach - d + segments.length] for d in range(1, reach + 1)]
        return torch.stack(steps, -2).cummin(-2).values

    def _convolved(self, x: Tensor, continues: Tensor | None, segments: Segments) -> Tensor:
        """Return the causal convolution of each feature, [batch, tokens, features], within documents."""
        reach = self.kernel_size - 1
        with torch._C.DisableTorchFunctionSubclass():  # a `SplitParameter` is its local shard here
            weight = torch.cat((self.conv_query, self.conv_key, self.conv_value))
        runs = x.unflatten(_TOKENS, (-1, segments.length))
        if reach:
            runs = self._with_before(runs, reach, segments)
        if continues is None:
            y = F.conv1d(runs.flatten(0, 1).mT, weight.unsqueeze(1), groups=len(weight)).mT
            return y.reshape(x.shape)
        y = runs[:, :, reach:] * weight[:, -1]
        for d in range(1, reach + 1):
            y = y + runs[:, :, reach - d : -d] * continues[:, :, d - 1, :, None] * weight[:, -1 - d]
        return y.flatten(1, 2)

    def _attended(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        beta: Tensor,
        decay: Tensor,
        continues: Tensor | None,
        segments: Segments,
    ) -> Tensor:
        """Return the outputs of this rank's heads and tokens, [batch, tokens, heads, value_dim]."""
        wide = torch.promote_types(query.dtype, torch.float32)
        with torch._C.DisableTorchFunctionSubclass():
            rate, bias = self.A_log.view(-1).to(wide).exp(), self.dt_bias.view(-1).to(wide)
        log_decay = -rate * F.softplus(decay.to(wide) + bias)

        def heads(x: Tensor, size: int) -> Tensor:
            """Return [batch, tokens, heads * size] as [batch, runs, heads, tokens of a run, size]."""
            return x.to(wide).unflatten(-1, (-1, size)).unflatten(_TOKENS, (-1, segments.length)).transpose(2, 3)

        groups = self.num_heads // self.num_key_heads
        query, key = (_unit(heads(x, self.key_dim)).repeat_interleave(groups, 2) for x in (query, key))
        log_decay, beta = (heads(x, 1).squeeze(-1) for x in (log_decay, beta.to(wide).sigmoid()))
        starts = None if continues is None else ~continues[:, :, :1]
        query, value = query / math.sqrt(self.key_dim), heads(value, self.value_dim)
        chunks = DeltaChunks.of(query, key, value, log_decay, beta, starts, self.chunk)
        state = None
        if len(segments.order) > 1:
            sequence = self.parallel.sequence
            assert sequence is not None
            group = self.context.group(sequence.axes)
            maps = conjugate(chunks.affine().transpose(0, 1), "gather", "reduce_scatter", group, dim=0)
            own = self._own(query.shape[1])
            state = prefix_states(maps, segments.order, own).transpose(0, 1)
        out = chunks.outputs(state)
        return out.transpose(2, 3).flatten(1, 2)


def _unit(x: Tensor) -> Tensor:
    """Return vectors of length 1, [.., features]."""
    return x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()
