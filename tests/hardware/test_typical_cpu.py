"""A machine that nobody has measured."""

from __future__ import annotations

import pytest

from colossus.hardware.hardware import OPERATIONS
from colossus.hardware.typical_cpu import TypicalCPU


def test_it_answers_all_that_hardware_is_asked() -> None:
    here = TypicalCPU(cores=8, threads=2, memory=4e9)
    assert (here.is_measured, here.overlaps, here.at_once, here.memory_bytes) == (False, False, 4, 4e9)
    assert here.matmul_seconds(1000, 1000, 1000, "fp32") == pytest.approx(2e9 / 100e9, rel=0.01)
    assert here.matmul_seconds(8, 8, 8, "fp64") > here.matmul_seconds(8, 8, 8, "fp32")
    half = here.attention_seconds(4, 512, 64, "fp32")
    assert here.attention_seconds(4, 512, 64, "fp32", backward=True) > 2 * half
    assert here.memory_seconds(5e9) == 1
    assert here.eager_seconds(1.0, 100) == pytest.approx(1.001)
    for operation in OPERATIONS:
        seconds = [here.collective_seconds(operation, 4, held, hosts=hosts) for hosts in (1, 2) for held in (4e3, 4e6)]
        assert 0 < seconds[0] < seconds[1]
        assert 0 < seconds[2] < seconds[3]
    with pytest.raises(ValueError, match="a typical CPU has no figure for products in int8; it has fp64, fp32"):
        here.matmul_seconds(8, 8, 8, "int8")
