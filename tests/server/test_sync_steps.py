"""Synchronous steps at servers, and the clocks of workers."""

from __future__ import annotations

import threading

import pytest
import torch
from helpers.servers import local_servers, made, pulled
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from colossus.rows.row_gradient import RowGradient
from colossus.server.calls import Refused
from colossus.server.client import Servers

NAMES = ["w", "table"]


def gradients(step: int, worker: int) -> dict[str, Tensor | RowGradient | None]:
    """Of one worker: dense, some rows, and nothing at times. Magnitudes differ, so that the order of a sum shows."""
    generator = torch.Generator().manual_seed(100 * step + worker)
    rows = torch.randperm(7, generator=generator)[: worker + 1].sort().values
    of_rows = RowGradient(rows, torch.randn(len(rows), 2, generator=generator) * 10.0 ** (worker * 3))
    dense = torch.randn(5, generator=generator) * 10.0 ** (worker * 3)
    return {"w": None if (step + worker) % 4 == 0 else dense, "table": of_rows}


@settings(deadline=None, max_examples=10)
@given(orders=st.lists(st.permutations([0, 1, 2]), min_size=3, max_size=3), num_servers=st.integers(1, 3))
def test_a_step_does_not_depend_on_the_order_of_arrival(orders: list[list[int]], num_servers: int) -> None:
    """Bit for bit, values and norm; and they are those of one process."""
    w, table = nn.Parameter(torch.ones(5)), nn.Parameter(torch.ones(7, 2))
    w_optimizer, table_optimizer = torch.optim.SGD([w], lr=0.1), torch.optim.SparseAdam([table], lr=0.1)
    with local_servers(num_servers, 3) as workers:
        optimizers = {"w": dict(type="sgd"), "table": dict(type="adam")}
        made(workers, {"w": w, "table": table}, optimizers=optimizers)
        for step, order in enumerate(orders):
            for worker in order:
                workers[worker].accumulate(step, gradients(step, worker)).wait()
            replies = [workers[worker].squares(step, NAMES).wait() for worker in order]
            w.grad, dense = None, [gradients(step, worker)["w"] for worker in range(3)]
            for part in dense:
                if isinstance(part, Tensor):
                    w.grad = part.clone() if w.grad is None else w.grad + part
            of_rows = [part for worker in range(3) if isinstance(part := gradients(step, worker)["table"], RowGradient)]
            total = RowGradient.added(of_rows)
            table.grad = total.as_sparse(7)
            squares = {"w": 0.0 if w.grad is None else float(w.grad.double().square().sum())}
            squares["table"] = float(total.rows.double().square().sum())
            for reply in replies:
                assert reply == pytest.approx(squares, rel=1e-12)
                assert reply == replies[0]
            for param in (w, table):
                if param.grad is not None:
                    param.grad *= 0.25
            w_optimizer.step()
            table_optimizer.step()
            first: dict[str, Tensor] = {}
            for worker in reversed(order):
                into = {"w": torch.empty(5), "table": torch.empty(7, 2)}
                workers[worker].apply(step, NAMES, {"lr": 0.1, "scale": 0.25}, into=into).wait()
                torch.testing.assert_close(into["w"], w.detach(), rtol=1e-6, atol=1e-6)
                torch.testing.assert_close(into["table"], table.detach(), rtol=1e-6, atol=1e-6)
                first = first or into
                assert all(torch.equal(into[name], first[name]) for name in NAMES)


def test_squares_wait_for_all_parts_and_an_overflow_drops_them() -> None:
    with local_servers(2, 2) as workers:
        made(workers, {"w": torch.ones(4)}, optimizer=dict(type="sgd", lr=1.0))
        workers[0].accumulate(0, {"w": torch.full((4,), torch.inf)})
        early = workers[0].squares(0, ["w"])
        with pytest.raises(Refused, match="step 0 is to be applied before the squares"):
            workers[1].apply(0, ["w"]).wait()
        assert not early.is_done()
        workers[1].accumulate(0, {"w": torch.ones(4)}).wait()
        assert early.wait() == {"w": torch.inf}
        workers[1].apply(0, ["w"], found_inf=True).wait()
        assert workers[1].squares(0, ["w"]).wait() == {"w": torch.inf}  # asked for after the update
        assert torch.equal(pulled(workers[0], "w", torch.empty(4)), torch.ones(4))


def test_who_dies_in_a_step_is_named() -> None:
    with local_servers(1, 2) as workers:
        made(workers, {"w": torch.ones(4)}, optimizer=dict(type="sgd", lr=1.0))
        workers[0].accumulate(7, {"w": torch.ones(4)}).wait()
        waiting = workers[0].squares(7, ["w"])
        workers[1].close()
        with pytest.raises(Refused, match=r"worker 1 has gone .* without its part of 'w' in step 7"):
            waiting.wait()


def test_a_part_is_given_once_and_before_its_step_is_over() -> None:
    with local_servers(1, 2) as workers:
        made(workers, {"w": torch.zeros(2)}, optimizer=dict(type="sgd", lr=-1.0))
        for worker in workers:
            worker.accumulate(0, {"w": torch.full((2,), 7.0)})  # a step that fails
            worker.accumulate(1, {"w": torch.ones(2)}).wait()
        with pytest.raises(Refused, match="worker 0 has sent its part already"):
            workers[0].accumulate(1, {"w": torch.ones(2)}).wait()
        workers[0].squares(1, ["w"]).wait()
        workers[0].apply(1, ["w"]).wait()
        for step in (0, 1):
            with pytest.raises(Refused, match=f"a part of step {step}, whose sum was taken already"):
                workers[1].accumulate(step, {"w": torch.ones(2)}).wait()
        assert pulled(workers[1], "w", torch.empty(2)).tolist() == [2.0, 2.0]


def test_stale_synchronous_workers() -> None:
    """In threads: nobody begins a step more than two ahead; a worker that ends in the middle is not waited for."""
    most, steps, leads = 2, 20, []
    finished = [0, 0, 0]

    def run(worker: Servers) -> None:
        me = worker.worker
        for step in range(5 if me == 2 else steps):
            worker.clock(step, most).wait()
            leads.append(step - min(count for other, count in enumerate(finished) if other != 2 or count < 5))
            threading.Event().wait(0.002 * me)
            finished[me] = step + 1
        if me:
            worker.close()

    with local_servers(2, 3) as workers:
        threads = [threading.Thread(target=run, args=(worker,), daemon=True) for worker in workers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        assert finished == [steps, steps, 5]
        assert 0 < max(leads) <= most
        workers[0].clock(steps, 0).wait()  # the others have closed
