"""The law of parity as one check, and the ranks on which its cases run."""

from __future__ import annotations

from typing import Any

from helpers.covered import note_plan
from helpers.training import Trace, assert_same_numbers, assert_same_run, is_key_bias, relative, train

from colossus.context.local_ranks import LocalRanks

FP64 = dict(loss=1e-10, norm=1e-10, parameter=1e-9)
FP32 = dict(loss=1e-6, norm=1e-5, parameter=1e-4)
#: relative, between runs of which each rounds in its own places: of losses, of norms, and of each gradient or weight
#: by the norm of its difference. bfloat16 has 8 bits, float16 has 11.
BOUNDS = {"bf16": (2**-12, 2**-8, 2**-4), "fp16": (2**-15, 2**-11, 2**-7)}


def assert_parity(traces: list[Trace], reference: Trace, precision: str, title: str = "") -> None:
    """Raise AssertionError unless each rank's run is that of one process: in float64 each number of it.

    Args:
        title: beginning of the message, where a test has several runs.
    """
    try:
        _require_parity(traces, reference, precision)
    except AssertionError as error:
        raise AssertionError(f"{title}: {error}" if title else str(error)) from error


def _require_parity(traces: list[Trace], reference: Trace, precision: str) -> None:
    for trace in traces:
        assert trace.tokens == reference.tokens
        assert trace.losses == traces[0].losses, "ranks report different losses"
        assert trace.norms == traces[0].norms, "ranks report different norms"
        if not trace.end:  # only the first rank has gathered it
            continue
        if precision in BOUNDS:
            assert outside(trace, reference, precision) == []
            continue
        assert_same_run(trace, reference, **(FP64 if precision == "fp64" else FP32))
        if precision == "fp64":
            assert_same_numbers(trace, reference)


def gaps(trace: Trace, reference: Trace) -> tuple[float, float, float]:
    """Return the largest relative difference of losses, of norms, and of gradients and weights."""
    states = [*zip(trace.gradients, reference.gradients, strict=True), (trace.end, reference.end)]
    of_states = [
        ((mine[name] - value).norm() / value.norm().clamp(min=1e-3 * reference.norms[0])).item()
        for mine, wanted in states
        for name, value in wanted.items()
        if not is_key_bias(name)
    ]
    losses, norms = (
        [relative(a, b) for a, b in zip(mine, wanted, strict=True)]
        for mine, wanted in ((trace.losses, reference.losses), (trace.norms, reference.norms))
    )
    return max(losses), max(norms), max(of_states)


def outside(trace: Trace, reference: Trace, precision: str) -> list[float]:
    """Return the gaps that are larger than the bounds of a low precision."""
    return [gap for gap, bound in zip(gaps(trace, reference), BOUNDS[precision], strict=True) if not gap <= bound]


class TrainingRanks:
    """Groups of ranks, one of each size, that train one config after the other: each group starts when it is needed,
    and anew after a failure."""

    def __init__(self) -> None:
        self._groups: dict[int, LocalRanks] = {}
        self._references: dict[str, Trace] = {}

    def reference(self, config: dict[str, Any], steps: int) -> Trace:
        """Return the trace of one process, which trains each config once."""
        key = repr((config, steps))
        if key not in self._references:
            (self._references[key],) = self.run(1, config, steps)
        return self._references[key]

    def run(self, world: int, config: dict[str, Any], steps: int) -> list[Trace]:
        """Return the ranks' traces of a training run; gradients and weights are those of its end, on the first rank."""
        if world not in self._groups:
            self._groups[world] = LocalRanks(world, _Trainer, patience=60.0, collective_timeout=60.0)
        try:
            note_plan(config)
            return self._groups[world].call("train", config, steps)
        except BaseException:
            self._groups.pop(world).close()
            raise

    def close(self) -> None:
        """End all ranks."""
        for ranks in self._groups.values():
            ranks.close()


class _Trainer:
    def __init__(self, rank: int) -> None:
        self.rank = rank

    def train(self, config: dict[str, Any], steps: int) -> Trace:
        return train(self.rank, config, steps, only_end=True)
