"""What of a config may be changed so that a plan needs less memory and still trains the same model. No torch."""

from __future__ import annotations

from collections.abc import Iterator

from colossus.config import Config


def remedies(config: Config) -> Iterator[tuple[str, ...]]:
    """Overrides of a config, each with less memory, the cheapest in time first; at last all kinds together."""
    stages, kinds, counts = _zero_stages(config), _checkpoint_kinds(config), _microbatches(config)
    yield from ((f"parallel.zero.stage={stage}",) for stage in stages)
    yield from ((f"schedule.microbatches={count}",) for count in counts)
    yield from ((f"train.activation_checkpoint={kind}",) for kind in kinds)
    last = [
        *(f"parallel.zero.stage={stage}" for stage in stages[-1:]),
        *(f"schedule.microbatches={count}" for count in counts[-1:]),
        *(f"train.activation_checkpoint={kind}" for kind in kinds[-1:]),
    ]
    if len(last) > 1:
        yield tuple(last)


def _zero_stages(config: Config) -> list[int]:
    """Those above the config's, where replicas are summed and there are several."""
    parallel = config.parallel
    ranks = (parallel.data or 1) * parallel.sequence.size
    if ranks == 1 or parallel.data_strategy["type"] not in ("all_reduce", "zero"):
        return []
    return list(range(parallel.zero.stage + 1, 4))


def _microbatches(config: Config) -> list[int]:
    """Twice and four times as many, where the batch of a replica divides."""
    number, batch = config.schedule.microbatches, config.train.global_batch_size // (config.parallel.data or 1)
    return [number * times for times in (2, 4) if batch % (number * times) == 0]


def _checkpoint_kinds(config: Config) -> list[str]:
    kinds = ["none", "selective", "full"]
    return kinds[kinds.index(config.train.activation_checkpoint.type) + 1 :]
