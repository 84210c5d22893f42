"""``colossus.average``: tensors of a user's own, averaged by gossip over running ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from helpers.ranks import grid, run_ranks
from torch import Tensor
from torch import distributed as dist

import colossus
from colossus.context.parallel_context import ParallelContext
from colossus.graphs.graph import make_graph

IRREGULAR = [[0.5, 0.2, 0.25], [0.5, 0.6, 0], [0, 0.2, 0.75]]


class Pair(NamedTuple):
    one: Tensor
    other: list[Tensor]


def nest_of(rank: int) -> dict[str, Any]:
    """Odd sizes, several dtypes, strides, a scalar, an empty one."""
    draw = torch.Generator().manual_seed(rank)

    def numbers(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
        return torch.randn(shape, generator=draw, dtype=torch.float64).to(dtype)

    return {
        "w": torch.nn.Parameter(numbers(5, 3)),
        "pair": Pair(numbers(7, 2).t(), [numbers(3, dtype=torch.float32), numbers(dtype=torch.float32)]),
        "half": (numbers(4, 5, dtype=torch.bfloat16), numbers(3, dtype=torch.float16)),
        "complex": torch.complex(numbers(3), numbers(3)),
        "empty": numbers(0, 4),
        "row": numbers(1, 3).expand(2, 3),
    }


def flat(nest: dict[str, Any]) -> list[Tensor]:
    pair = nest["pair"]
    return [nest["w"], pair.one, *pair.other, *nest["half"], nest["complex"], nest["empty"], nest["row"]]


def on_ranks(context: ParallelContext) -> dict[str, Any]:
    rank = context.group("data").index
    nest = nest_of(rank)
    before = [tensor.detach().clone() for tensor in flat(nest)]
    out = {"mean": colossus.average(nest), "ring": colossus.average(nest, graph="ring", iterations=3)}
    x = torch.tensor([float(rank)], dtype=torch.float64)
    out["none"] = colossus.average(x, iterations=0)
    out["nothing"] = colossus.average({"a": []})
    out["weighted"] = colossus.average(x, graph=IRREGULAR, iterations=60)
    out["unchanged"] = all(torch.equal(one, other) for one, other in zip(before, flat(nest), strict=True))
    return out


def test_against_numpy() -> None:
    replicas = 3
    results = run_ranks(replicas, on_ranks, plan=grid(data=replicas))
    nests = [nest_of(rank) for rank in range(replicas)]
    ring = make_graph("ring", replicas)
    power = np.linalg.matrix_power(ring.at(0).matrix, 3)
    for rank, result in enumerate(results):
        assert result["unchanged"]
        assert result["nothing"] == {"a": []}
        assert isinstance(result["mean"]["pair"], Pair)
        assert not result["mean"]["w"].requires_grad
        for index, tensor in enumerate(flat(result["mean"])):
            every = [flat(nest)[index].detach() for nest in nests]
            wide = [one.to(torch.complex128 if one.is_complex() else torch.float64) for one in every]
            assert (tensor.dtype, tensor.shape) == (every[0].dtype, every[0].shape)
            rounding = 2 * torch.finfo(tensor.dtype).eps
            # 3 ranks and hops of 1 and 2: within 1e-6 of the mean
            assert_close(tensor, sum(wide) / replicas, max(4e-6, rounding))
            mixed = sum(power[rank, other] * wide[other] for other in range(replicas))
            assert_close(flat(result["ring"])[index], mixed, max(1e-14, rounding))
        assert result["none"].item() == rank
        assert result["weighted"].item() == pytest.approx(1.0, abs=1e-12)


def assert_close(tensor: Tensor, wanted: Any, tolerance: float) -> None:
    if tensor.numel():
        assert (tensor.to(wanted.dtype) - wanted).abs().max() <= tolerance * max(1.0, wanted.abs().max())


def without_context(rank: int) -> tuple[list[float], list[float]]:
    draw = torch.randn(9, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)
    mean = colossus.average([draw])[0]
    dist.all_reduce(draw)
    return mean.tolist(), (draw / 4).tolist()


def test_without_an_engine() -> None:
    """Over all ranks of a process group of one's own; exact, since 4 is a power of two."""
    for mean, wanted in run_ranks(4, without_context, with_context=False):
        assert mean == pytest.approx(wanted, abs=1e-15)


def test_one_process() -> None:
    x = torch.randn(3, requires_grad=True)
    out = colossus.average({"x": x}, graph="torus", peers=5)
    assert torch.equal(out["x"], x)
    assert out["x"].data_ptr() != x.data_ptr()


def _ones() -> Tensor:
    return torch.ones(2, 3)


class Fails(dict[str, Any]):
    def items(self) -> Any:
        raise ZeroDivisionError("no items")


REFUSED: list[tuple[Callable[[int], Any], str]] = [
    (
        lambda rank: colossus.average({"w": torch.ones(2, 3 + (rank == 2))}),
        "rank 0 passes tensors['w']: float32 [2, 3], but rank 2 tensors['w']: float32 [2, 4]; pass the same on all",
    ),
    (
        lambda rank: colossus.average([_ones()] * (1 + (rank == 1))),
        "rank 0 passes nothing more, but rank 1 tensors[1]: float32 [2, 3]",
    ),
    (lambda rank: colossus.average([_ones(), "x" if rank == 1 else _ones()]), "tensors[1] is str; only tensors are"),
    (lambda rank: colossus.average(torch.ones(2).bool()), "tensors is bool, which cannot represent a mean"),
    (
        lambda rank: colossus.average(_ones(), graph="bipartite_exponential"),
        "pairs odd replicas",
    ),
    (
        lambda rank: colossus.average(_ones(), graph=np.array(IRREGULAR).T),
        "graph over 3 ranks: column 0 sums to 0.95, not 1",
    ),
    (lambda rank: colossus.average(Fails() if rank == 2 else {"w": _ones()}), "ZeroDivisionError: no items (on rank 2"),
    (
        lambda rank: colossus.average(_ones(), iterations=2 + (rank == 2)),
        "rank 0 passes iterations 2, but rank 2 iterations 3; pass the same on all ranks",
    ),
    (
        lambda rank: colossus.average(_ones(), graph="ring" if rank else "star", iterations=2),
        "rank 0 passes the graph ",
    ),
]


def refusals(context: ParallelContext) -> list[str]:
    said = []
    for call, _ in REFUSED:
        with pytest.raises(ValueError) as caught:  # noqa: PT011 the words are looked at by the test
            call(context.rank)
        said.append(str(caught.value))
    assert colossus.average(torch.tensor([3.0 * context.rank]), graph="complete").item() == 3.0
    return said


def test_refused_on_all_ranks_alike() -> None:
    for said in run_ranks(3, refusals, plan=grid(data=3)):
        for line, (_, expected) in zip(said, REFUSED, strict=True):
            assert line.startswith(f"colossus.average: {expected}"), line
