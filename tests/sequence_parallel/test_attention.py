"""Attention over a sequence that is split over ranks, against plain attention in one process."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.fx.experimental.symbolic_shapes  # torch.autograd.grad imports it (seconds): once, before ranks are forked
from helpers.drawn import examples
from helpers.ranks import RankError, run_ranks
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from colossus.comm import accounting, collectives, links, shared_memory
from colossus.context.grid import RankGrid
from colossus.context.groups import AxisGroup
from colossus.context.parallel_context import ParallelContext
from colossus.layers import checkpointing
from colossus.sequence_parallel import kernels, ring_attention, tiles
from colossus.sequence_parallel.attend import attend
from colossus.sequence_parallel.mask import CAUSAL, FAR, FULL, Mask
from colossus.sequence_parallel.modes import attention_traffic, require_divisible, zigzag_order

ALONE = AxisGroup((), (0,), 0, None)


@dataclass(frozen=True)
class Case:
    """One attention. ``local`` tokens on each rank."""

    local: int = 4
    batch: int = 2
    heads: int = 4
    kv_heads: int = 4
    head_dim: int = 5
    mask: Mask = CAUSAL
    documents: str | None = None
    dtype: torch.dtype = torch.float64
    seed: int = 0
    scale: float | None = None
    soft_cap: float | None = None
    sinks: bool = False
    chunks: int = 2

    def draw(self, total: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """q, k, v and the gradient of the output, of all tokens."""
        generator = torch.Generator().manual_seed(self.seed)
        shapes = [(self.batch, heads, total, self.head_dim) for heads in (self.heads, self.kv_heads, self.kv_heads)]
        q, k, v, dout = (
            torch.randn(shape, generator=generator, dtype=torch.float64).to(self.dtype)
            for shape in (*shapes, shapes[0])
        )
        return q, k, v, dout

    def draw_sinks(self) -> Tensor | None:
        generator = torch.Generator().manual_seed(self.seed + 2)
        return torch.randn(self.heads, generator=generator, dtype=torch.float64) if self.sinks else None

    def draw_documents(self, total: int) -> Tensor | None:
        """Numbers of the documents [batch, total]."""
        if self.documents is None:
            return None
        generator = torch.Generator().manual_seed(self.seed + 1)
        if self.documents == "one":
            return torch.full((self.batch, total), 7)
        if self.documents == "any":  # numbers in no order
            return torch.randint(-1, 4, (self.batch, total), generator=generator)
        starts = torch.rand(self.batch, total, generator=generator) < 3 / total
        packed = starts.long().cumsum(1)
        if self.documents == "packed":
            return packed
        assert self.documents == "padding"
        lengths = torch.randint(1, total + 1, (self.batch, 1), generator=generator)
        return torch.where(torch.arange(total) < lengths, packed, -1)


def dense(mask: Mask, total: int) -> Tensor:
    """What a mask means, [total, total]: by its sizes, not by the ranges of positions that they make."""
    query, key = torch.arange(total)[:, None], torch.arange(total)
    near = (query - key <= mask.left) & (key - query <= mask.right)
    behind_prefix = (key > query) & (key >= mask.prefix_size)
    return near & (query // mask.chunk_size == key // mask.chunk_size) & ~behind_prefix


@cache
def oracle(case: Case, total: int) -> list[Tensor]:
    """out, dq, dk, dv (dsinks) of plain attention in float64, the whole score matrix at once."""
    *inputs, dout = (x.double() for x in case.draw(total))
    q, k, v = (x.requires_grad_() for x in inputs)
    group = case.heads // case.kv_heads
    scale = case.scale or 1 / math.sqrt(case.head_dim)
    scores = q @ k.repeat_interleave(group, 1).transpose(-1, -2) * scale
    if case.soft_cap is not None:
        scores = (scores / case.soft_cap).tanh() * case.soft_cap
    sees = dense(case.mask, total)
    documents = case.draw_documents(total)
    if documents is not None:
        sees = sees & (documents[:, None, :, None] == documents[:, None, None, :])
    scores, sinks = scores.masked_fill(~sees, float("-inf")), case.draw_sinks()
    if sinks is not None:
        scores = torch.cat((scores, sinks.requires_grad_()[:, None, None].expand(*scores.shape[:-1], 1)), -1)
    out = scores.softmax(-1)[..., :total] @ v.repeat_interleave(group, 1)
    leaves = [q, k, v] if sinks is None else [q, k, v, sinks]
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


TOLERANCE = {torch.float64: 1e-13, torch.float32: 2e-6, torch.bfloat16: 4e-2}


#: that of the ring, and that of Ulysses
Groups = tuple[AxisGroup, AxisGroup]


def sequence_groups(context: ParallelContext) -> Groups:
    return context.group("ring"), context.group("ulysses")


def shard_of(total: int, ring: AxisGroup, ulysses: AxisGroup, chunks: int) -> list[int]:
    """The tokens that a rank holds."""
    size = total // (ring.size * ulysses.size)
    return zigzag_order(total, ring.size, chunks)[(ring.index * ulysses.size + ulysses.index) * size :][:size]


def plan(ring_ranks: int, ulysses_ranks: int = 1) -> RankGrid:
    sizes = {"pipeline": 1, "data": 1, "ring": ring_ranks, "ulysses": ulysses_ranks, "tensor": 1}
    public = {name: (name,) for name in ("pipeline", "data", "tensor")} | {"sequence": ("ring", "ulysses")}
    return RankGrid(sizes, public)


@dataclass
class Run:
    """This rank's share of an attention, forward and backward."""

    case: Case
    groups: Groups

    def __post_init__(self) -> None:
        self.total = self.case.local * math.prod(group.size for group in self.groups)
        self.mine = torch.tensor(shard_of(self.total, *self.groups, self.case.chunks))
        self.inputs = [x[:, :, self.mine] for x in self.case.draw(self.total)]
        documents = self.case.draw_documents(self.total)
        self.documents = None if documents is None else documents[:, self.mine]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Tensor:
        case = self.case
        options: dict[str, Any] = dict(scale=case.scale, soft_cap=case.soft_cap, sinks=sinks, chunks=case.chunks)
        return attend(q, k, v, *self.groups, mask=case.mask, documents=self.documents, **options)

    def results(self, function: Any = None) -> list[Tensor]:
        *inputs, dout = self.inputs
        sinks = self.case.draw_sinks()
        leaves = [x.detach().requires_grad_() for x in (*inputs, *([] if sinks is None else [sinks]))]
        out = (function or self.attend)(*leaves)
        results = [out.detach(), *torch.autograd.grad(out, leaves, dout)]
        for group in self.groups if sinks is not None else ():
            results[4] = collectives.all_reduce(results[4], group).wait()
        return results

    def check(self, results: list[Tensor]) -> None:
        wanted = oracle(self.case, self.total)
        for name, got, whole in zip(("out", "dq", "dk", "dv", "dsinks"), results, wanted, strict=False):
            assert got.dtype == (self.case.dtype if name != "dsinks" else torch.float64)
            own = whole[:, :, self.mine] if name != "dsinks" else whole
            error = (got.double() - own).abs().max() / max(1.0, whole.abs().max())
            assert error < TOLERANCE[self.case.dtype], f"{name} is off by {error:.1e} in {self.case}"


def run_exact(cases: list[Case], ring_ranks: int, ulysses_ranks: int) -> None:
    """What is right is computed here, for all ranks."""
    ranks = ring_ranks * ulysses_ranks
    for case in cases:
        oracle(case, case.local * ranks)
    run_ranks(ranks, _exact, cases, plan=plan(ring_ranks, ulysses_ranks))


def _exact(context: ParallelContext, cases: list[Case]) -> None:
    groups = sequence_groups(context)
    for case in cases:
        run = Run(case, groups)
        run.check(run.results())


DOCUMENTS = [None, "packed", "padding", "any", "one"]
SHAPES = (
    [
        Case(mask=mask, documents=documents, kv_heads=kv_heads, heads=8, local=local)
        for mask in (CAUSAL, FULL)
        for documents in DOCUMENTS
        for kv_heads, local in ((8, 2), (4, 6))
    ]
    + [
        Case(mask=mask, documents=documents, kv_heads=kv_heads, heads=8, local=6)
        for mask, documents, kv_heads in (
            (Mask.window(0), None, 8),
            (Mask.window(1), None, 4),
            (Mask.window(2), "packed", 8),
            (Mask.window(4), "any", 4),
            (Mask.window(8), None, 4),
            (Mask.window(3, 2), None, 8),
            (CAUSAL & Mask.chunk(5), "packed", 4),
            (Mask.chunk(8) & Mask.window(30, 3), None, 4),
            (Mask.prefix(7), None, 8),
            (Mask.prefix(9) & Mask.window(4, 5), "padding", 4),
        )
    ]
    + [
        Case(kv_heads=4, heads=8, local=6, sinks=True),
        Case(kv_heads=8, heads=8, local=8, chunks=4),
        Case(mask=Mask.window(9), kv_heads=8, heads=8, local=8, chunks=4),
        Case(documents="packed", kv_heads=4, heads=8, local=16, chunks=8),
        Case(mask=Mask.window(3), kv_heads=8, heads=8, local=6, soft_cap=0.7),
        Case(mask=FULL, documents="padding", kv_heads=4, heads=8, local=6, sinks=True, soft_cap=0.9),
    ]
)


@pytest.mark.rest("1-4", "4-1")
@pytest.mark.parametrize(("ring_ranks", "ulysses_ranks"), [(4, 1), (1, 4), (2, 2), (1, 1)])
def test_exact(ring_ranks: int, ulysses_ranks: int) -> None:
    """In float64, and close in less precision."""
    low = [replace(case, dtype=dtype, local=16) for dtype in (torch.float32, torch.bfloat16) for case in SHAPES[::2]]
    run_exact([*SHAPES, *low], ring_ranks, ulysses_ranks)


def _exact_with_tiles(context: ParallelContext, cases: list[Case], tile: int) -> None:
    tiles.TILE = tile
    _exact(context, cases)


@st.composite
def masks(draw: st.DrawFn) -> Mask:
    """Any mask of the algebra: an intersection of its kinds."""
    mask = draw(st.sampled_from([FULL, CAUSAL]))
    if draw(st.booleans()):
        mask &= Mask.window(draw(st.integers(0, 30)), draw(st.integers(0, 30)))
    if draw(st.booleans()):
        mask &= Mask.chunk(draw(st.integers(1, 30)))
    if draw(st.booleans()):
        mask &= Mask.prefix(draw(st.integers(0, 30)))
    return mask


@st.composite
def drawn_cases(draw: st.DrawFn, ring_ranks: int, ulysses_ranks: int) -> list[Case]:
    cases = []
    for _ in range(6):
        kv_heads = ulysses_ranks * draw(st.integers(1, 2))
        # a ring rank has two chunks, which its Ulysses ranks share
        chunks = draw(st.sampled_from([2, 2, 4, 6]))
        local = draw(st.integers(1, 12).filter(lambda n: ring_ranks == 1 or n * ulysses_ranks % chunks == 0))
        cases.append(
            Case(
                local=local,
                batch=draw(st.integers(1, 3)),
                heads=kv_heads * draw(st.integers(1, 3)),
                kv_heads=kv_heads,
                head_dim=draw(st.integers(1, 9)),
                mask=draw(masks()),
                documents=draw(st.sampled_from(DOCUMENTS)),
                seed=draw(st.integers(0, 1000)),
                scale=draw(st.sampled_from([None, 0.7])),
                soft_cap=draw(st.sampled_from([None, 0.8])),
                sinks=draw(st.booleans()),
                chunks=chunks,
            )
        )
    return cases


@settings(max_examples=examples(4), suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data(), ranks=st.sampled_from([(2, 1), (3, 1), (1, 3), (2, 2)]), tile=st.sampled_from([1, 3, 512]))
def test_exact_whatever_the_shape(data: st.DataObject, ranks: tuple[int, int], tile: int) -> None:
    cases = data.draw(drawn_cases(*ranks))
    for case in cases:
        oracle(case, case.local * math.prod(ranks))
    run_ranks(math.prod(ranks), _exact_with_tiles, cases, tile, plan=plan(*ranks))


def _exact_as_on_an_accelerator(context: ParallelContext, cases: list[Case], tile: int) -> None:
    """Documents are not read, so all tiles have masks; the messages of a step go in one batch."""
    tiles.can_be_read = lambda documents: False
    tiles.MASKED_TILE = tile
    if context.size("ring") > 1:
        shared_memory.enable(False)
        for hop in range(1, context.size("ring")):
            links.ring_of(context.group("ring"), torch.device("cpu"), hop).has_batches = True
        for alone in ("send", "receive"):
            setattr(links.Links, alone, None)
    _exact(context, cases)


@pytest.mark.rest("3-1-2")
@pytest.mark.parametrize(("ring_ranks", "ulysses_ranks", "tile"), [(2, 1, 2048), (3, 1, 2), (2, 2, 3), (1, 2, 5)])
def test_exact_as_on_an_accelerator(ring_ranks: int, ulysses_ranks: int, tile: int) -> None:
    ranks = ring_ranks * ulysses_ranks
    cases = [*SHAPES[::3], *(replace(case, dtype=torch.bfloat16, local=16) for case in SHAPES[1::6])]
    run_ranks(ranks, _exact_as_on_an_accelerator, cases, tile, plan=plan(ring_ranks, ulysses_ranks))


# -- what can go wrong around it ---------------------------------------------------------------------------


def _checkpointed(context: ParallelContext, kind: str, keep_ring: bool) -> tuple[float, float]:
    """Bytes sent round the ring in forward and in backward, both with recomputation."""
    if keep_ring:
        checkpointing.UNITS.add(ring_attention.RING_ATTENTION)
    else:
        checkpointing.UNITS.discard(ring_attention.RING_ATTENTION)
    groups = sequence_groups(context)
    for case in (Case(documents="padding"), Case(mask=FULL, kv_heads=2), Case()):
        run = Run(case, groups)
        weight = torch.linspace(0.5, 1.5, case.head_dim, dtype=case.dtype)

        def twice(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            """Two rings, one after the other; what is between has activations of its own."""
            return run.attend(run.attend(q * weight, k, v).tanh(), k, v)

        def saved(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return checkpointing.recompute(twice, q, k, v, context=context, kind=kind)

        for got, wanted in zip(run.results(saved), run.results(twice), strict=True):
            assert torch.equal(got, wanted)
    *inputs, dout = run.inputs
    q, k, v = (x.detach().requires_grad_() for x in inputs)
    sent = []
    for _ in range(2):
        with accounting.count() as moved:
            out = saved(q, k, v)
            forward = moved.bytes("ring")
            torch.autograd.grad(out, (q, k, v), dout)
        sent = [forward, moved.bytes("ring") - forward]
    return sent[0], sent[1]


@pytest.mark.rest("selective-False-3")
@pytest.mark.parametrize(
    ("kind", "keep_ring", "backward"), [("full", False, 3), ("selective", False, 3), ("selective", True, 2)]
)
def test_gradients_stay_the_same_under_activation_checkpointing(kind: str, keep_ring: bool, backward: int) -> None:
    """Kept as one result, the ring does not run again. Bit for bit: nothing kept is overwritten later."""
    for sent in run_ranks(4, _checkpointed, kind, keep_ring, plan=plan(2, 2)):
        assert sent[1] == backward * sent[0] > 0


# -- what is sent and computed -----------------------------------------------------------------------------


def _counted(context: ParallelContext, case: Case) -> list[tuple[float, float]]:
    """Elements sent in forward and in backward: of keys, values and so on, and of document numbers."""
    run = Run(case, sequence_groups(context))
    run.check(run.results())
    q, k, v = (x.detach().requires_grad_() for x in run.inputs[:3])

    def elements(counter: accounting.Counter, dtype: torch.dtype) -> float:
        return sum(tally.bytes for key, tally in counter.entries.items() if key[2] == dtype) / dtype.itemsize

    with accounting.count() as forward:
        out = run.attend(q, k, v)
    with accounting.count() as backward:
        torch.autograd.grad(out, (q, k, v), run.inputs[3])
    return [(elements(forward, dtype), elements(backward, dtype)) for dtype in (case.dtype, torch.int64)]


@pytest.mark.parametrize(("ring_ranks", "ulysses_ranks"), [(2, 1), (4, 1), (1, 4), (2, 2)])
def test_what_is_sent_is_what_the_formula_says(ring_ranks: int, ulysses_ranks: int) -> None:
    ways = dict(ring=ring_ranks, ulysses=ulysses_ranks)
    ranks = ring_ranks * ulysses_ranks
    case = Case(local=6, heads=8, kv_heads=4, head_dim=3, batch=2, documents="any")
    tokens = case.batch * case.local * ranks
    values = attention_traffic(tokens, 8, 4, 3, **ways)
    # document numbers are gathered over the Ulysses ranks, and go round the ring with the keys in each direction
    gathered, passed = (ulysses_ranks - 1) * tokens / ranks, (ring_ranks - 1) / ring_ranks * tokens
    for got in run_ranks(ranks, _counted, case, plan=plan(ring_ranks, ulysses_ranks)):
        assert got == [(values.forward, values.backward), (gathered + passed, passed)]
    if ulysses_ranks == 1:
        assert values.forward == 2 * (ring_ranks - 1) / ring_ranks * tokens * 4 * 3
        assert values.backward == 2 * values.forward


@given(ring=st.integers(1, 6), chunk=st.integers(1, 5), mask=masks(), chunks=st.sampled_from([2, 4]))
def test_steps_of_a_mask_are_those_with_work(ring: int, chunk: int, mask: Mask, chunks: int) -> None:
    tokens = tiles.RingTokens(chunks * chunk, ring, chunks)
    busy = {
        step
        for step in range(ring)
        for rank in range(ring)
        if any(tiles.attention_tiles(mask, tokens, rank, (rank - step) % ring))
    }
    assert tiles.needed_steps(mask, tokens) == tuple(sorted(busy))


@given(ring=st.integers(1, 4), chunk=st.integers(1, 6), mask=masks(), size=st.integers(1, 5), data=st.data())
def test_tiles_of_a_mask_have_each_of_its_pairs_once(
    ring: int, chunk: int, mask: Mask, size: int, data: st.DataObject
) -> None:
    chunks = data.draw(st.sampled_from([2, 4]))
    own, total = chunks * chunk, chunks * chunk * ring
    tokens = tiles.RingTokens(own, ring, chunks)
    positions = [zigzag_order(total, ring, chunks)[rank * own :][:own] for rank in range(ring)]
    computed = torch.zeros(total, total, dtype=torch.int64)
    with patch.object(tiles, "TILE", size), patch.object(tiles, "MASKED_TILE", data.draw(st.integers(size, 9))):
        for query_rank, key_rank in product(range(ring), repeat=2):
            for tile in tiles.attention_tiles(mask, tokens, query_rank, key_rank):
                rows, columns = positions[query_rank][tile.queries], positions[key_rank][tile.keys]
                sees = torch.ones(len(rows), len(columns), dtype=torch.int64)
                sees = sees if tile.mask is None else sees * tile.mask[0, 0]
                computed[torch.tensor(rows)[:, None], torch.tensor(columns)] += sees.tril() if tile.causal else sees
    assert torch.equal(computed, dense(mask, total).long())
    assert mask.num_pairs(total) == dense(mask, total).sum()
    simple = mask.within(total)
    assert torch.equal(dense(simple, total), dense(mask, total))
    if simple.is_causal:
        assert not dense(mask, total).triu(1).any()


@given(one=masks(), other=masks())
def test_an_intersection_has_the_pairs_of_both(one: Mask, other: Mask) -> None:
    small, large = sorted((one.chunk_size, other.chunk_size))
    if large < FAR and large % small:
        with pytest.raises(ValueError, match="must be a multiple"):
            one & other
        return
    both = one & other
    assert torch.equal(dense(both, 40), dense(one, 40) & dense(other, 40))
    assert both == other & one


def test_masks_print_as_they_are_written() -> None:
    printed = {
        "causal": Mask.causal(),
        "full": Mask.full(),
        "window(3, 0)": Mask.causal() & Mask.window(3, 9),
        "causal & chunk(4)": Mask.chunk(8) & Mask.causal() & Mask.chunk(4),
        "window(all, 2) & prefix(5)": Mask.prefix(5) & Mask(right=2),
    }
    assert {str(mask): mask for mask in printed.values()} == printed
    with pytest.raises(ValueError, match=r"chunk\(6\) & chunk\(4\): the size of one chunk must be a multiple"):
        Mask.chunk(6) & Mask.chunk(4)
    with pytest.raises(ValueError, match=r"window\(-1, 0\): sizes of a mask cannot be negative"):
        Mask.window(-1)


def test_a_window_is_sent_to_neighbours_only() -> None:
    case = Case(local=6, mask=Mask.window(2))
    oracle(case, 4 * case.local)
    block = case.batch * case.kv_heads * case.local * case.head_dim
    for (forward, backward), _ in run_ranks(4, _counted, case, plan=plan(4)):
        assert (forward, backward) == (2 * 2 * block, 2 * 4 * block)


def computed(ranks: int, index: int, length: int, mask: Mask = CAUSAL) -> int:
    """Scores that one rank computes."""
    scores = 0
    for source in range(ranks):
        for tile in tiles.attention_tiles(mask, tiles.RingTokens(length, ranks), index, source):
            rows, columns = (span.stop - span.start for span in (tile.queries, tile.keys))
            scores += rows * (rows + 1) // 2 if tile.causal else rows * columns
    return scores


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_every_rank_computes_the_same_and_none_computes_what_is_masked(ranks: int) -> None:
    total = 8192
    shares = [computed(ranks, index, total // ranks) for index in range(ranks)]
    assert max(shares) == min(shares)
    assert sum(shares) == total * (total + 1) // 2, "as many as causal attention has in one process"
    assert sum(computed(ranks, index, 64, FULL) for index in range(ranks)) == (64 * ranks) ** 2


@pytest.mark.parametrize(("chunks", "most"), [(2, 3.0), (32, 1.1)])
def test_chunks_spread_packed_documents(chunks: int, most: float) -> None:
    """Scores of the rank with most over the mean, 16 documents of the lengths of files on 4 ranks."""
    sizes = [900, 15000, 340, 4200, 7400, 120, 26000, 2300, 610, 9800, 5100, 3300, 12200, 1800, 450, 8784]
    work = torch.cat([torch.arange(1, size + 1) for size in sizes]).double()
    order = torch.tensor(zigzag_order(len(work), 4, chunks))
    share = work[order].view(4, -1).sum(1)
    worst = (share.max() / share.mean()).item()
    assert (1.3 if chunks == 2 else 1.0) < worst < most


def _kernel_calls(context: ParallelContext, case: Case, documents: Tensor | None) -> tuple[list[bool], list[bool]]:
    """Whether each kernel call had a mask, forward and backward."""
    run = Run(case, sequence_groups(context))
    if documents is not None:
        run.documents = documents[:, run.mine]
    calls: tuple[list[bool], list[bool]] = ([], [])

    def counting(function: Any, seen: list[bool]) -> Any:
        def count(*args: Any, **options: Any) -> Any:
            seen.append(options["mask"] is not None)
            return function(*args, **options)

        return count

    with (
        patch.object(ring_attention, "block_forward", counting(kernels.block_forward, calls[0])),
        patch.object(ring_attention, "block_backward", counting(kernels.block_backward, calls[1])),
    ):
        run.results()
    return calls


def test_a_block_is_one_kernel_call() -> None:
    for calls in run_ranks(4, _kernel_calls, Case(), None, plan=plan(4)):
        assert calls == ([False] * 4, [False] * 4)
    for calls in run_ranks(4, _kernel_calls, Case(documents="one"), None, plan=plan(4)):
        assert calls == ([False] * 4, [False] * 4), "one document needs no mask"


def test_blocks_without_a_common_document_are_skipped() -> None:
    chunk, ranks = 3, 4
    case = Case(local=2 * chunk, batch=2)
    of_a_chunk = torch.arange(2 * ranks).repeat_interleave(chunk).expand(2, -1)
    for calls in run_ranks(ranks, _kernel_calls, case, of_a_chunk, plan=plan(ranks)):
        assert calls == ([False] * 2, [False] * 2), "head and tail meet themselves only, and wholly"
    # one token of the last chunk belongs to the first document, in one sample
    crossing = of_a_chunk.clone()
    crossing[1, -1] = 0
    masked = [sum(calls[0]) for calls in run_ranks(ranks, _kernel_calls, case, crossing, plan=plan(ranks))]
    assert masked == [2, 0, 0, 0], "the last chunk to itself and to the first; rank 0 has both"
    # numbers 0 and 2 on one side, 1 on the other: ranges overlap, but nothing matches
    between = torch.tensor([[0, 2, 0, 2, 1, 1, 1, 1]])
    calls = run_ranks(1, _kernel_calls, Case(local=8, batch=1), between, plan=plan(1))
    assert calls == [([True], [True])]
    assert not list(tiles.attention_tiles(FULL, tiles.RingTokens(4, 2), 0, 1, between[:, :4], between[:, 4:]))


# -- the tests can fail ------------------------------------------------------------------------------------


def _tokens_in_order(context: ParallelContext) -> None:
    """No zigzag: each ring rank has consecutive tokens."""

    with patch.dict(globals(), zigzag_order=lambda total, ring, chunks: list(range(total))):
        _exact(context, [Case()])


def _a_sink_in_each_step(context: ParallelContext) -> None:
    """Every block of keys has the sink beside it, not their sum alone."""
    forward = kernels.block_forward

    def with_sink(*args: Any, **options: Any) -> tuple[Tensor, Tensor]:
        out, lse = forward(*args, **options)
        return out, torch.logaddexp(lse, case_sinks[:, None])

    case = Case(sinks=True)
    case_sinks = case.draw_sinks()
    assert case_sinks is not None
    with patch.object(ring_attention, "block_forward", with_sink):
        _exact(context, [case])


@pytest.mark.parametrize("wrong", [_tokens_in_order, _a_sink_in_each_step])
def test_these_tests_can_fail(wrong: Any) -> None:
    with pytest.raises(RankError, match="out is off"):
        run_ranks(4, wrong, plan=plan(4))


# -- order, kernels, errors --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("total", "ring_ranks", "ulysses_ranks", "words"),
    [
        (100, 8, 1, r"100 tokens .* 8 x 1 = 8 .* multiple of 16; the nearest that is: 96 and 112"),
        (3, 1, 4, r"multiple of 4; the nearest that is: 4$"),
        (20, 2, 4, r"multiple of 8; the nearest that is: 16 and 24"),
    ],
)
def test_a_length_that_does_not_split_is_told(total: int, ring_ranks: int, ulysses_ranks: int, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        require_divisible(total, ring_ranks, ulysses_ranks)


def _blocks(dtype: torch.dtype, mask: bool, causal: bool, kv_heads: int = 2) -> tuple[list[Tensor], dict[str, Any]]:
    generator = torch.Generator().manual_seed(3)
    q, k, v, dout = (torch.randn(2, heads, 6, 4, generator=generator).to(dtype) for heads in (4, kv_heads, kv_heads, 4))
    sees = torch.rand(2, 1, 6, 6, generator=generator) < 0.5 if mask else None
    if sees is not None:
        sees[:, :, 2] = False  # a query that sees nothing
    return [dout, q, k, v], dict(causal=causal, mask=sees, scale=0.4)


@pytest.mark.parametrize(("mask", "causal"), [(False, False), (False, True), (True, False)])
def test_the_plain_kernel_is_the_same(mask: bool, causal: bool) -> None:
    (dout, q, k, v), options = _blocks(torch.float64, mask, causal)
    out, lse = kernels.block_forward(q, k, v, **options)
    whole_lse = lse.clamp(min=-10.0) + 0.3  # of more keys than these
    grads = kernels.block_backward(dout, q, k, v, out, whole_lse, **options)
    with patch.object(kernels, "_kernel", lambda q, mask: "plain"):
        same_out, same_lse = kernels.block_forward(q, k, v, **options)
        same_grads = kernels.block_backward(dout, q, k, v, out, whole_lse, **options)
    # what a query gets that sees nothing is not defined: it weighs nothing
    sees = lse > -1e30
    assert bool(sees.all()) is not mask
    pairs = zip((same_out[sees], same_lse, *same_grads), (out[sees], lse, *grads), strict=True)
    for got, wanted in pairs:
        assert got.shape == wanted.shape
        torch.testing.assert_close(got, wanted, rtol=1e-13, atol=1e-13)
    assert all(x.isfinite().all() for x in (out, lse, *grads))
    if mask:
        assert (lse[:, :, 2] < -1e30).all()
        assert (grads[0][:, :, 2] == 0).all()


@pytest.mark.parametrize("kernel", ["flash", "efficient"])
def test_the_cuda_kernels_are_called_as_torch_declares_them(kernel: str) -> None:
    """Shapes and signatures only: on the meta device nothing is computed."""
    (dout, q, k, v), options = _blocks(torch.float16, mask=kernel == "efficient", causal=kernel == "flash")
    dout, q, k, v = (x.to("meta") for x in (dout, q, k, v))
    if options["mask"] is not None:
        options["mask"] = options["mask"].to("meta")
    with patch.object(kernels, "_kernel", lambda q, mask: kernel):
        out, lse = kernels.block_forward(q, k, v, **options)
        assert out.shape == q.shape
        assert lse.shape == q.shape[:-1]
        assert lse.dtype == torch.float32
        grads = kernels.block_backward(dout, q, k, v, out, lse, **options)
    assert [x.shape for x in grads] == [x.shape for x in (q, k, v)]


def _errors(context: ParallelContext) -> list[str]:
    groups = sequence_groups(context)
    told = []
    q = torch.zeros(2, 4, 6, 8)
    k = q[:, :2]
    three = torch.zeros(2, 3, 6, 8)
    crossed, straight = (ALONE, groups[0]), (groups[0], ALONE)
    attempts: list[tuple[tuple[Tensor, ...], Groups, Tensor | None]] = [
        ((three, three, three), crossed, None),
        ((q, three, three), straight, None),
        ((q[:, :, :5], k[:, :, :5], k[:, :, :5]), straight, None),
        ((q, k, k), straight, torch.zeros(2, 12, dtype=torch.int64)),
    ]
    for inputs, given_groups, documents in attempts:
        try:
            attend(*inputs, *given_groups, mask=CAUSAL, documents=documents)
            told.append("nothing")
        except ValueError as error:
            told.append(str(error))
    return told


def test_errors_explain() -> None:
    words = [
        "3 heads on each tensor rank do not divide over 2 ranks",
        "queries (2, 4, 6, 8), keys (2, 3, 6, 8)",
        "not 5 tokens: the number must be a multiple of 2",
        "documents (2, 12) of torch.int64 must be whole numbers [batch, tokens] = [2, 6]",
    ]
    for told in run_ranks(2, _errors, plan=plan(2)):
        for sentence, part in zip(told, words, strict=True):
            assert part in sentence


def test_flash_kernels_are_those_of_ampere_and_later(monkeypatch: pytest.MonkeyPatch) -> None:
    has_flash = kernels._has_flash.__wrapped__
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for capability, expected in (((7, 5), False), ((8, 0), True), ((9, 0), True)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, value=capability: value)
        assert has_flash(torch.device("cuda", 0)) is expected
