"""Collectives and their conjugates against what they mean on whole tensors; the log; compilation."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import on_host
from helpers.dense import dense
from helpers.ranks import grid, run_ranks
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from colossus import layers
from colossus.comm import accounting, collectives, log, shared_memory, tensor_transport
from colossus.comm.conjugate import conjugate, start
from colossus.construct.build_model import build
from colossus.context.parallel_context import ParallelContext
from colossus.layout.split_parameter import as_shards

PAIRS = [
    ("gather", "reduce_scatter"),
    ("gather", "slice"),
    ("reduce_scatter", "gather"),
    ("sum", "identity"),
    ("sum", "sum"),
    ("identity", "sum"),
    ("slice", "gather"),
    ("slice", "pad"),
]


def random_parts(n: int, shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=dtype) for _ in range(n)]


def scattered(x: Tensor) -> Tensor:
    """The same values with strides of another order and gaps between."""
    wide = torch.full((*reversed(x.shape), 2), -77, dtype=x.dtype)
    out = wide[..., 0].permute(*reversed(range(x.dim())))
    return out.copy_(x)


class Recorded(TorchDispatchMode):
    """A mode that does nothing; with any mode on, the functional ops must run."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.add(func.namespace)
        return func(*args, **(kwargs or {}))


def _check_pairs(context: ParallelContext, recorded: bool) -> int:
    group = context.group("tensor")
    n, me = group.size, group.index
    checks = 0
    double, single = torch.float64, torch.float32
    cases_of = [(double, (n,)), (double, (3 * n, 5 * n)), (single, (2 * n, n, 3 * n)), (double, (n, 2 * n, n, 3 * n))]
    for dtype, shape in cases_of:
        ndim = len(shape)
        dims = range(0 if ndim == 4 else -ndim, ndim)
        cases = [(*pair, dim, -1) for pair in PAIRS for dim in dims]
        cases += [
            ("all_to_all", "all_to_all", dim, to_dim)
            for dim, to_dim in itertools.product(dims, repeat=2)
            if dim % ndim != to_dim % ndim
        ]
        for forward, backward, dim, to_dim in cases:
            checks += 1
            x = random_parts(n, shape, dtype, checks)
            expected = dense(forward, x, dim, to_dim)
            dy = random_parts(n, tuple(expected[0].shape), dtype, checks + 1)
            back_dims = (to_dim, dim) if backward == "all_to_all" else (dim, to_dim)
            gradient = dense(backward, dy, *back_dims)
            local = (scattered(x[me]) if checks % 2 else x[me].clone()).requires_grad_()
            upstream = scattered(dy[me]) if checks % 3 == 0 else dy[me]
            before = local.detach().clone(), upstream.clone()
            mode = Recorded()
            if recorded:
                with mode:
                    out = conjugate(local, forward, backward, group, dim, to_dim)
                    out.backward(upstream)
                assert ("_c10d_functional" in mode.seen) or {forward, backward} <= {"slice", "pad", "identity"}
            else:
                out = conjugate(local, forward, backward, group, dim, to_dim)
                out.backward(upstream)
            what = f"{forward}/{backward} {shape} dim {dim} to {to_dim} {dtype}"
            tolerance = 1e-13 if dtype == torch.float64 else 1e-5
            torch.testing.assert_close(out.detach(), expected[me], rtol=tolerance, atol=tolerance, msg=what)
            torch.testing.assert_close(local.grad, gradient[me], rtol=tolerance, atol=tolerance, msg=what)
            assert torch.equal(local.detach(), before[0]), f"{what} changed its input"
            assert torch.equal(upstream, before[1]), f"{what} changed the gradient it was given"
    return checks


@pytest.mark.rest("3 in place", "4 in place", "2 functional")
@pytest.mark.parametrize(
    ("world", "recorded"),
    [(2, False), (3, False), (4, False), (2, True), (3, True)],
    ids=["2 in place", "3 in place", "4 in place", "2 functional", "3 functional"],
)
def test_conjugates_against_whole_tensors(world: int, recorded: bool) -> None:
    """Every pair, every dim from both ends, several numbers of dims, both dtypes, values and gradients."""
    counts = run_ranks(world, _check_pairs, recorded)
    assert min(counts) > 150


def _by_messages(context: ParallelContext) -> int:
    """On gloo, with every tensor as large as those that messages carry faster."""
    shared_memory.enable(False)
    tensor_transport._MESSAGES_BYTES = 1
    return _check_pairs(context, False)


@pytest.mark.rest("3")
@pytest.mark.parametrize("world", [2, 3])
def test_large_tensors_go_by_messages_on_gloo(world: int) -> None:
    assert min(run_ranks(world, _by_messages)) > 150


def _through_the_host(context: ParallelContext) -> list[int]:
    staged = on_host.pretend()
    _plain_collectives(context)
    counts = [_check_pairs(context, False), _check_pairs(context, True)]
    assert staged.copies == staged.returned > 500
    assert _compiled(context) == (True, True, True)
    tensor_transport._MESSAGES_BYTES = 1
    shared_memory.enable(False)
    before = staged.copies
    counts.append(_check_pairs(context, False))
    assert staged.copies > before
    return counts


@pytest.mark.long
def test_tensors_of_a_device_go_through_the_host_under_gloo() -> None:
    """Through shared memory and c10d, in place and functional, compiled."""
    assert min(map(min, run_ranks(2, _through_the_host, timeout=120))) > 150


def _sub_groups(context: ParallelContext) -> list[Any]:
    out = []
    for axes in ("tensor", "data", ("data", "tensor"), ("tensor", "data"), "pipeline"):
        x = torch.tensor([float(context.rank)], requires_grad=True)
        y = conjugate(x, "gather", "reduce_scatter", context.group(axes), 0)
        (y * torch.arange(1.0, y.numel() + 1)).sum().backward()
        out.append((y.tolist(), x.grad.item()))
    return out


def test_groups_of_some_ranks() -> None:
    results = run_ranks(4, _sub_groups, plan=grid(data=2, tensor=2))
    tensor, data, both, reverse, alone = results[2]
    assert (tensor, data) == (([2.0, 3.0], 2.0), ([0.0, 2.0], 4.0))
    assert both == ([0.0, 1.0, 2.0, 3.0], 12.0)
    assert reverse == ([0.0, 2.0, 1.0, 3.0], 8.0)
    assert alone == ([2.0], 1.0)


def _plain_collectives(context: ParallelContext) -> None:
    group = context.group("tensor")
    n, me = group.size, group.index
    for seed, dtype in enumerate((torch.float32, torch.float64, torch.int64, torch.bfloat16)):
        parts = [(part * 8).round().to(dtype) for part in random_parts(n, (7, 3), torch.float32, seed)]
        for op in ("sum", "max"):
            for x in (parts[me].clone(), scattered(parts[me]), parts[me].t().contiguous().t()):
                for owned in (False, True):
                    operand = x.clone(memory_format=torch.preserve_format)
                    reduced = collectives.all_reduce(operand, group, op=op, owned=owned).wait()
                    assert torch.equal(reduced, dense(op, parts, 0, 0)[0]), (dtype, op, owned)
                    assert owned or torch.equal(operand, x)
    # scalars: the loss
    for op in ("sum", "max"):
        total = collectives.all_reduce(torch.tensor(me + 1.0), group, op=op).wait()
        assert total.shape == ()
        assert total.item() == (n * (n + 1) / 2 if op == "sum" else n)
    assert collectives.all_gather(torch.tensor(float(me)), group).wait().tolist() == [
        float(index) for index in range(n)
    ]
    x = torch.tensor(1.0, requires_grad=True)
    conjugate(x, "identity", "sum", group).backward()
    assert x.grad.item() == n
    y = conjugate(torch.tensor(1.0, requires_grad=True), "sum", "identity", group)
    assert y.item() == n
    # nothing to send
    assert collectives.all_reduce(torch.zeros(0, 3), group).wait().shape == (0, 3)
    assert collectives.all_gather(torch.zeros(2, 0), group, 0).wait().shape == (2 * n, 0)
    assert collectives.reduce_scatter(torch.zeros(0, n), group, 1).wait().shape == (0, 1)
    assert collectives.all_to_all(torch.zeros(n, 0), group, 0, 1).wait().shape == (1, 0)


@pytest.mark.parametrize("world", [2, 3])
def test_dtypes_max_scalars_and_empty(world: int) -> None:
    run_ranks(world, _plain_collectives)


def test_one_rank_moves_nothing() -> None:
    group = ParallelContext(grid()).group("tensor")
    x = torch.randn(3, 5, requires_grad=True)
    with accounting.count() as moved:
        for forward, backward in [*PAIRS, ("all_to_all", "all_to_all")]:
            assert conjugate(x, forward, backward, group, 0, 1) is x
        for operation in ("sum", "gather", "reduce_scatter", "all_to_all"):
            assert start(operation, x, group, 0, 1).wait() is x
    assert moved.calls() == 0


# -- the order of additions -----------------------------------------------------------------------------------

SLOT = 8 << 20  # bytes; about here another algorithm takes over


def _same_bits(context: ParallelContext) -> None:
    group = context.group("tensor")
    n = group.size
    for seed, size in enumerate([1, 3, 257, 8192, 8193, 200_001, SLOT // 4, SLOT // 4 + 1]):
        parts = random_parts(n, (size,), torch.float32, seed)
        # values of very different size, so that the order of additions shows
        scale = 10.0 ** torch.randint(-6, 7, (size,), generator=torch.Generator().manual_seed(size))
        parts = [part * scale.roll(rank) for rank, part in enumerate(parts)]
        for owned in (False, True):
            total = collectives.all_reduce(parts[group.index].clone(), group, owned=owned).wait()
            everywhere = collectives.all_gather(total.view(torch.int32).unsqueeze(0), group, 0).wait()
            assert torch.equal(everywhere, everywhere[:1].expand(n, -1)), (size, owned)
            if n == 2:
                assert torch.equal(total, parts[0] + parts[1])
            if size > 10_000:
                continue
            exact, bound = sum(part.double() for part in parts), sum(part.abs().double() for part in parts)
            assert ((total.double() - exact).abs() <= bound * n * 2.0**-24).all()


@pytest.mark.rest("2")
@pytest.mark.parametrize("world", [2, 3, pytest.param(4, marks=pytest.mark.long)])
def test_a_sum_is_the_same_on_all_ranks(world: int) -> None:
    """Bit for bit, at every size: replicas that drift apart by one bit drift apart for good."""
    run_ranks(world, _same_bits)


# -- errors ---------------------------------------------------------------------------------------------------


def _errors(context: ParallelContext) -> list[str]:
    group = context.group("tensor")
    x = torch.zeros(4, 6, 5)
    calls: list[Callable[[], Any]] = [
        lambda: collectives.all_to_all(x, group, split_dim=0, concat_dim=1),
        lambda: conjugate(x, "slice", "gather", group, -1),
        lambda: collectives.reduce_scatter(x, group, -4),
        lambda: collectives.own_chunk(torch.zeros(()), group, 0),
    ]
    messages = []
    with accounting.count() as moved:
        for call in calls:
            try:
                call()
                messages.append("nothing")
            except ValueError as error:
                messages.append(str(error).partition(". ")[0].partition("\n")[0])
    assert moved.calls() == 0, "what was refused was counted"
    assert not any("WAITING" in line for line in log.recent()), "what was refused is in the log"
    return messages


def test_errors_say_what_does_not_divide() -> None:
    first = "of a tensor of shape (4, 6, 5) has {} elements, which do not divide over the 3 ranks of axis tensor"
    missing = "a tensor of shape {} has no dim {}"
    for messages in run_ranks(3, _errors):
        assert messages == [
            f"dim 0 {first.format(4)}",
            f"dim 2 {first.format(5)}",
            missing.format("(4, 6, 5)", -4),
            missing.format("()", 0),
        ]


def _twice(context: ParallelContext) -> str:
    x = torch.ones(3, requires_grad=True)
    y = conjugate(x, "sum", "identity", context.group("tensor"))
    try:
        (first,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        first.sum().backward()
    except ValueError as error:
        return str(error)
    return "no error"


def test_a_second_derivative_is_refused() -> None:
    """The movement of a gradient is not recorded: its derivative would be wrong without a word."""
    assert all("differentiated again (create_graph=True" in message for message in run_ranks(2, _twice))


# -- memory ---------------------------------------------------------------------------------------------------


# -- the log --------------------------------------------------------------------------------------------------


@pytest.fixture
def clean_log() -> Any:
    log.clear()
    yield
    log.clear()
    log.resize(32)


def test_the_log_is_bounded(clean_log: None) -> None:
    log.resize(5)
    for index in range(12):
        log.record("sum", "tensor", (index,), torch.float32)
    lines = log.recent()
    assert len(lines) == 5
    assert lines[0].startswith("#8 sum over tensor [7 float32] at ")
    log.resize(2)
    assert [line.split()[0] for line in log.recent()] == ["#11", "#12"]


def _sites(context: ParallelContext) -> list[str]:
    log.clear()
    group = context.group("tensor")
    x = torch.ones(2, requires_grad=True)
    pending = collectives.all_reduce(torch.ones(2), group)  # site 1
    waiting = log.recent()
    pending.wait()
    y = conjugate(x, "sum", "sum", group)  # site 2
    y.sum().backward()  # site 3
    with Recorded():
        conjugate(x, "gather", "reduce_scatter", group)  # site 4
    assert len(waiting) == 1
    return [*waiting, *log.recent()]


def test_call_sites_are_lines_of_the_caller() -> None:
    import inspect

    lines, first = inspect.getsourcelines(_sites)
    numbers = {line.split("# ")[1].strip(): first + index for index, line in enumerate(lines) if "# site " in line}
    for waiting, one, two, three, four in run_ranks(2, _sites):
        assert "WAITING" in waiting
        assert "done" in one
        for number, line in enumerate((one, two, three, four), start=1):
            assert f"test_collectives.py:{numbers[f'site {number}']}: done" in line, line
        assert three.startswith("#3 all_reduce over tensor [2 float32]")


# -- compilation ----------------------------------------------------------------------------------------------


def _compiled(context: ParallelContext) -> tuple[bool, bool, bool]:
    group = context.group("tensor")

    def function(x: Tensor) -> Tensor:
        whole = conjugate(x * 2, "gather", "reduce_scatter", group, 0)
        return conjugate(whole.sin(), "sum", "identity", group)

    results = []
    for run in (function, torch.compile(function, backend="aot_eager", fullgraph=True)):
        x = random_parts(context.world_size, (3, 4), torch.float64, 0)[context.rank].requires_grad_()
        y = run(x)
        y.square().sum().backward()
        results.append((y.detach(), x.grad))
    (y, dx), (compiled_y, compiled_dx) = results
    return torch.equal(y, compiled_y), torch.equal(dx, compiled_dx), bool(dx.abs().sum() > 0)


def _compiled_layers(context: ParallelContext) -> list[float]:
    model = build(lambda: layers.MLP(8, 16), context, dtype=torch.float64)
    x = random_parts(1, (2, 4, 8), torch.float64, 0)[0]
    results = []
    for run in (model, torch.compile(model, backend="aot_eager", fullgraph=True)):
        model.zero_grad()
        y = run(x)
        y.square().sum().backward()
        results.append([y.detach(), *(parameter.grad.clone() for parameter in model.parameters())])
    with as_shards():
        return [(a - b).abs().max().item() for a, b in zip(*results, strict=True)]


@pytest.mark.long
def test_conjugates_and_a_column_row_pair_compile_into_one_graph() -> None:
    """In one group of ranks: a compiler takes longer to start than to compile these."""
    for conjugates, pair in run_ranks(2, lambda context: (_compiled(context), _compiled_layers(context)), timeout=120):
        assert conjugates == (True, True, True)
        assert max(pair) < 1e-12
        assert len(pair) == 5
