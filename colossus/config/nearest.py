"""The plans that fit, nearest to one that does not. No torch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Protocol

from colossus.config.schema import Config, Parallel
from colossus.config.sizes import batch_problems, describe_processes, mode_problems, shard_problems, world_size

Sizes = tuple[int, int, int, int]


class ModelOptions(Protocol):
    """What a class in ``MODEL_OPTIONS`` offers; a pydantic model gives the best messages for wrong keys.

    Optional are ``samples`` and ``counted``, what a batch consists of and what the loss counts: "sequences" and
    "tokens" unless they say otherwise.
    """

    def check(self, parallel: Parallel) -> list[str]:
        """Problems of the sizes under this plan, one line each."""


def suggestions(config: Config, options: ModelOptions | None, nproc: int, fits: bool) -> str:
    plans = nearest_plans(config, options, nproc)
    if plans:
        out = f"\n  nearest plans that fit {describe_processes(nproc)}:" + "".join(f"\n    {plan}" for plan in plans)
    else:
        out = f"\n  no plan of these axes fits {describe_processes(nproc)}, this model and this batch"
    if not fits and config.parallel.data is not None:
        wanted = world_size(config.parallel)
        out += f"\n  or keep the plan and start {describe_processes(wanted)} (--nproc {wanted})"
    return out


def nearest_plans(config: Config, options: ModelOptions | None, nproc: int, most: int = 4) -> list[str]:
    """Plans for ``nproc`` processes that fit model and batch, nearest first, as the overrides to type.

    Only axes that the config uses already are varied: data and tensor always, pipeline and sequence when not 1.
    """
    parallel = config.parallel
    now: Sizes = (parallel.data or 0, parallel.pipeline.size, parallel.sequence.size, parallel.tensor.size)
    keys = ("parallel.data", "parallel.pipeline.size", "parallel.sequence.size", "parallel.tensor.size")

    def distance(sizes: Sizes) -> tuple[float, int]:
        # A derived data size (0) is free: it is not the user's choice.
        ratios = [abs(math.log2(new / old)) for new, old in zip(sizes, now, strict=True) if old]
        return round(sum(ratios), 9), sum(ratio > 0 for ratio in ratios)

    found: list[str] = []
    for sizes in sorted(_factorisations(nproc, now), key=distance):
        if sizes == now or len(found) == most:
            continue
        data, pipeline, sequence, tensor = sizes
        candidate = parallel.model_copy(
            update={
                "data": data,
                "pipeline": parallel.pipeline.model_copy(update={"size": pipeline}),
                "sequence": parallel.sequence.model_copy(update={"size": sequence}),
                "tensor": parallel.tensor.model_copy(update={"size": tensor}),
            }
        )
        if mode_problems(candidate) or shard_problems(candidate) or batch_problems(config, candidate):
            continue
        if options is not None and options.check(candidate):
            continue
        changed = [f"{key}={new}" for key, new, old in zip(keys, sizes, now, strict=True) if old and new != old]
        if changed:
            found.append(" ".join(changed))
    return found


def _factorisations(nproc: int, now: Sizes) -> Iterator[Sizes]:
    small = [n for n in range(1, math.isqrt(nproc) + 1) if nproc % n == 0]
    divisors = sorted({*small, *(nproc // n for n in small)})
    for tensor in divisors:
        for sequence in divisors if now[2] > 1 else [1]:
            for pipeline in divisors if now[1] > 1 else [1]:
                data, rest = divmod(nproc, tensor * sequence * pipeline)
                if not rest:
                    yield data, pipeline, sequence, tensor
