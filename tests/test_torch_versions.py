"""What stands in for what an older torch has not gives the same, under the torch that has both."""

from __future__ import annotations

import warnings

import pytest
import torch
from helpers.ranks import run_ranks
from torch import Tensor
from torch import distributed as dist

from colossus import torch_versions
from colossus.comm import autograd as comm_autograd


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        comm_autograd.save_for_backward(ctx, x, None)
        SEEN.append(hasattr(ctx, "saved_early"))
        return x**3

    @staticmethod
    def backward(ctx: object, dy: Tensor) -> Tensor:
        x, none = comm_autograd.saved_tensors(ctx)
        assert none is None
        return dy * 3 * x**2


SEEN: list[bool] = []


def test_what_is_saved_when_a_forward_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    def gradient() -> tuple[Tensor, list[bool]]:
        SEEN.clear()
        x = torch.tensor([2.0, -5.0], requires_grad=True)
        torch.utils.checkpoint.checkpoint(lambda x: Cube.apply(Cube.apply(x)), x, use_reentrant=False).sum().backward()
        return x.grad, list(SEEN)  # type: ignore[return-value]

    wanted = 9 * torch.tensor([2.0, -5.0]) ** 8
    has = torch_versions.make_saved_tensor is not None
    found, early = gradient()
    torch.testing.assert_close(found, wanted)
    assert any(early) == has
    monkeypatch.setattr(torch_versions, "make_saved_tensor", None)
    found, early = gradient()
    torch.testing.assert_close(found, wanted)
    assert early == [False] * 4


def test_which_operations_are_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    aten = torch.ops.aten
    for tag in (torch_versions._INPLACE, None):
        monkeypatch.setattr(torch_versions, "_INPLACE", tag)
        for func in (aten.normal_.default, aten.erfinv_.default, aten.add_.Tensor, aten.fill_.Scalar):
            assert torch_versions.is_inplace(func)
        for func in (aten.normal.float_float, aten.add.Tensor, aten.add.out, aten.erfinv.default):
            assert not torch_versions.is_inplace(func)


def _under_old_names(context: object) -> None:
    rank = dist.get_rank()
    gathered, part = torch.empty(4), torch.empty(2)
    first_of = torch_versions.first_of
    gather = first_of(dist, "not_there", "all_gather_into_tensor", "all_gather_single")
    scatter = first_of(dist, "not_there", "reduce_scatter_tensor", "reduce_scatter_single")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        gather(gathered, torch.tensor([rank, 10.0 + rank]), group=None, async_op=True).wait()
        scatter(part, torch.arange(4.0) + rank, group=None, async_op=True).wait()
    assert gathered.tolist() == [0, 10, 1, 11]
    assert part.tolist() == ([1, 3] if rank == 0 else [5, 7])


def test_collectives_under_their_old_names() -> None:
    run_ranks(2, _under_old_names)
    assert torch_versions.first_of(dist, "not_there") is None
