"""Compressed sums of gradients: nothing is lost for good, replicas stay equal, PowerSGD is torch's, bytes."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from helpers.ranks import grid, run_ranks
from helpers.training import Trace, config_of, flat, is_key_bias, run_cases
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import colossus
from colossus.comm import accounting
from colossus.context.parallel_context import ParallelContext
from colossus.gradients.bucket_sum import BucketSum
from colossus.gradients.compressed_sum import Bf16Sum, ErrorFeedback, PowerSum

SHAPES = [(5, 7), (3,), (11, 5), (), (2, 3, 2)]
SIZES = [math.prod(shape) for shape in SHAPES]
#: of a bucket: gradients, and a flag of each
NUMEL, NUM_FLAGS = sum(SIZES), len(SHAPES)
FORCED: dict[str, Any] = dict(rank=1, start_step=0, min_compression_rate=0.0)
KINDS = ("bf16", "powersgd")


def made(kind: str, context: ParallelContext, num_inner: int, power: dict[str, Any]) -> tuple[BucketSum, ErrorFeedback]:
    params = [nn.Parameter(torch.zeros(shape, dtype=torch.float64)) for shape in SHAPES]
    me, size = context.index("data"), context.size("data")
    first = me // num_inner * num_inner
    host = context.subgroup("data", list(range(first, first + num_inner)))
    between = context.subgroup("data", list(range(me % num_inner, size, num_inner)))
    feedback = ErrorFeedback(lambda param: param, seed=3)
    if kind == "powersgd":
        return PowerSum(params, host, between, feedback, **power), feedback
    return Bf16Sum(params, context.group(()), host, between, feedback), feedback


def gradients(step: int, rank: int) -> Tensor:
    """Of very different sizes; the second parameter is used by rank 1 alone, the third by none."""
    generator = torch.Generator().manual_seed(10 * step + rank)
    numbers = torch.randn(NUMEL, generator=generator, dtype=torch.float64) * 10.0 ** (3 * rank - 2)
    pieces = numbers.split(SIZES)
    if rank != 1:
        pieces[1].zero_()
    pieces[2].zero_()
    return torch.cat((numbers, torch.tensor([1, rank == 1, 0, 1, 1], dtype=torch.float64)))


def _many_steps(context: ParallelContext, steps: int) -> dict[tuple[str, int], tuple[list[Tensor], Tensor]]:
    """Of each kind and number of ranks on a host: what comes out in each step, and the errors that are left."""
    all_found = {}
    for kind, num_inner in itertools.product(KINDS, (1, 2)):
        summed, memory = made(kind, context, num_inner, FORCED)
        found = []
        for step in range(steps):
            memory.begin(step)
            found.append(summed.start(gradients(step, context.rank)).wait().clone())
            memory.end()
        all_found[kind, num_inner] = found, torch.cat([view.flatten() for view in memory.errors.values()])
    return all_found


def test_what_is_left_out_of_a_sum_is_added_to_the_next() -> None:
    steps = 6
    of_ranks = run_ranks(4, _many_steps, steps, plan=grid(data=4))
    given = [sum(gradients(step, rank) for rank in range(4)) for step in range(steps)]
    for kind, num_inner in of_ranks[0]:
        ranks = [found[kind, num_inner] for found in of_ranks]
        for step in range(steps):
            for found, _ in ranks:
                assert torch.equal(found[step], ranks[0][0][step]), "replicas differ"
        for found, wanted in zip(ranks[0][0], given, strict=True):
            assert ((found[-NUM_FLAGS:] > 0) == (wanted[-NUM_FLAGS:] > 0)).all()
        out = sum(found[:-NUM_FLAGS] for found in ranks[0][0])
        # under PowerSGD ranks of a host have the same sum, and the same errors
        num_copies = num_inner if kind == "powersgd" else 1
        left = sum(errors for _, errors in ranks) / num_copies
        total = sum(given)[:-NUM_FLAGS]
        assert left.abs().max() > 1e-6 * total.abs().max()
        torch.testing.assert_close(out + left, total, rtol=0, atol=1e-10 * float(total.abs().max()))
        for found, wanted in zip(ranks[0][0], given, strict=True) if kind != "powersgd" else ():
            # every step by itself is right to the precision of the way
            gap = (found - wanted)[:-NUM_FLAGS].abs().max() / wanted[:-NUM_FLAGS].abs().max()
            assert gap < 2**-7


# -- runs -----------------------------------------------------------------------------------------------------

STEPS = 3


def settings(strategy: dict[str, Any], parallel: dict[str, Any], **more: Any) -> dict[str, Any]:
    optimizer = dict(type="SGD", lr=0.05, momentum=0.9)
    return config_of({**parallel, "strategy": strategy}, STEPS, "fp64", optimizer=optimizer, **more)


FULL = dict(compress="powersgd", rank=1000, start_step=1, min_compression_rate=0.0)
RUNS: dict[str, dict[str, Any]] = {
    "exact": dict(type="all_reduce"),
    "full rank": dict(type="all_reduce", **FULL),
    "full rank between hosts": dict(type="hierarchical", hosts=2, **FULL),
    "bf16": dict(type="all_reduce", compress="bf16"),
    "bf16 between hosts": dict(type="hierarchical", hosts=2, compress="bf16"),
    "rank 2": dict(type="all_reduce", compress="powersgd", rank=2, start_step=0, min_compression_rate=1.0),
}
PLANS: dict[str, tuple[int, dict[str, Any]]] = {
    "data": (4, dict(data=4)),
    "1d": (8, dict(data=4, tensor=2)),
    "pipeline": (8, dict(data=4, pipeline=2)),
    "sequence": (8, dict(data=4, sequence=2)),
}


@pytest.mark.parametrize("plan", ["data", *(pytest.param(name, marks=pytest.mark.long) for name in list(PLANS)[1:])])
def test_full_rank_is_no_compression_and_less_is_close(plan: str) -> None:
    world, parallel = PLANS[plan]
    names = [name for name in RUNS if plan != "data" or name not in ("full rank", "bf16")]
    configs = {name: settings(RUNS[name], parallel, comm=dict(bucket_mb=0.02)) for name in names}
    found = run_cases(world, configs, STEPS)
    for name, traces in found.items():
        for rank, (mine, wanted) in enumerate(zip(traces, found["exact"], strict=True)):
            limit = 1e-10 if "exact" in name or "full" in name else 0.02
            assert mine.losses == pytest.approx(wanted.losses, rel=limit)
            assert mine.tokens == wanted.tokens
            ends = [weights(trace) for trace in (mine, wanted)]
            assert (ends[0] - ends[1]).abs().max() < limit
            if limit > 1e-9:
                assert (ends[0] - ends[1]).abs().max() > 1e-8
            if plan == "data":
                assert torch.equal(flat(mine.end), flat(traces[0].end)), f"replica {rank} is another ({name})"


def weights(trace: Trace) -> Tensor:
    return flat({name: value for name, value in trace.end.items() if not is_key_bias(name)})


# -- torch's PowerSGD -----------------------------------------------------------------------------------------

WIDTH, HIDDEN, CLASSES, RANK, START = 12, 9, 7, 2, 2


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


def _loss(outputs: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    return nn.functional.cross_entropy(outputs, batch["labels"], reduction="sum"), len(outputs)


def _batch(step: int, rank: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    inputs = torch.randn(4, WIDTH, generator=generator, dtype=torch.float64)
    return {"inputs": inputs, "labels": torch.randint(0, CLASSES, (4,), generator=generator)}


def _ours_and_torchs(rank: int) -> tuple[list[Tensor], list[Tensor], float]:
    options = dict(compress="powersgd", rank=RANK, start_step=START, min_compression_rate=1.0)
    engine = colossus.initialize(
        dict(
            parallel=dict(data=2, strategy=dict(type="all_reduce", **options)),
            train=dict(steps=6, global_batch_size=8, precision="fp64", clip_grad_norm=None, seed=5),
            optimizer=dict(type="SGD", lr=0.3, momentum=0.9),
            lr_schedule=dict(type="constant", warmup_steps=0),
            device="cpu",
        ),
        model=Net,
        loss_fn=_loss,
    )
    twin = Net().double()
    twin.load_state_dict(engine.model.state_dict())
    memory = ErrorFeedback(lambda param: param, seed=5)
    state = PowerSGDState(None, RANK, START, min_compression_rate=1.0, warm_start=True)
    names = {tuple(param.shape): name for name, param in twin.named_parameters()}

    def hook(state: PowerSGDState, bucket: dist.GradBucket) -> Any:
        """torch's, begun with our random factors."""
        if state.iter >= START and 0 not in state.q_memory_dict:
            memory.step = state.iter
            matrices = [tuple(grad.shape) for grad in bucket.gradients() if grad.dim() == 2]
            starts = [
                memory.random_start(names[shape], (shape[1], RANK), torch.float64, torch.device("cpu"))
                for shape in matrices
            ]
            state.q_memory_dict[0] = torch.cat([start.flatten() for start in starts])
            state.p_memory_dict[0] = torch.zeros(sum(shape[0] for shape in matrices) * RANK, dtype=torch.float64)
        return powerSGD_hook(state, bucket)

    hook.__annotations__.update(bucket=dist.GradBucket)  # torch reads it, and knows no text
    hook.__annotations__["return"] = torch.futures.Future[Tensor]
    theirs = DistributedDataParallel(twin)
    theirs.register_comm_hook(state, hook)
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.3, momentum=0.9)
    exact = Net().double()
    exact.load_state_dict(engine.model.state_dict())
    of_exact = torch.optim.SGD(exact.parameters(), lr=0.3, momentum=0.9)
    for step in range(6):
        batch = _batch(step, rank)
        engine.train_step(batch)
        optimizer.zero_grad()
        nn.functional.cross_entropy(theirs(batch["inputs"]), batch["labels"]).backward()
        optimizer.step()
        of_exact.zero_grad()
        for other in range(2):
            each = _batch(step, other)
            (nn.functional.cross_entropy(exact(each["inputs"]), each["labels"]) / 2).backward()
        of_exact.step()
    gap = max((a - b).abs().max().item() for a, b in zip(exact.parameters(), engine.model.parameters(), strict=True))
    found = [param.detach().clone() for param in engine.model.parameters()]
    engine.close()
    return found, [param.detach().clone() for param in twin.parameters()], gap


def test_power_sgd_is_torchs() -> None:
    for ours, theirs, gap in run_ranks(2, _ours_and_torchs, with_context=False):
        for mine, wanted in zip(ours, theirs, strict=True):
            torch.testing.assert_close(mine, wanted, rtol=1e-9, atol=1e-11)
        assert gap > 1e-3  # what is compressed is not what it is compared with by rounding alone


# -- bytes ----------------------------------------------------------------------------------------------------


def _bytes(context: ParallelContext, num_inner: int) -> dict[str, float]:
    found = {}
    for kind in KINDS:
        summed, _ = made(kind, context, num_inner, FORCED)
        with accounting.count() as moved:
            summed.start(gradients(0, context.rank)).wait()
        found[kind] = moved.bytes()
    return found


def test_bytes_are_those_of_the_formula() -> None:
    n, flags = 4, 2 * NUM_FLAGS
    chunk = 2 * -(-NUMEL // n)  # of 16 bits each
    factors = sum((shape[0] + math.prod(shape[1:])) for shape in SHAPES if shape)  # of rank 1
    wanted = {
        "bf16": (n - 1) * (chunk + flags) + (n - 1) * chunk,
        "powersgd": 2 * (n - 1) / n * 8 * (factors + 1 + NUM_FLAGS),
    }
    for found in run_ranks(4, _bytes, 1, plan=grid(data=4)):
        assert found == wanted
