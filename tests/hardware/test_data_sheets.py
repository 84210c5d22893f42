"""What data sheets say of devices, and how long products and collectives take by them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from colossus.hardware.data_sheets import GAP, NETWORK, SHEETS, FromDataSheet, peak_flops
from colossus.hardware.hardware import OPERATIONS

#: as `torch.cuda.get_device_name` gives them -> bf16, or fp16 of those without
NAMES = {
    "NVIDIA H100 80GB HBM3": 989.5,
    "NVIDIA H100 PCIe": 756.5,
    "NVIDIA GH200 480GB": 989.5,
    "A100-SXM4-40GB": 312.0,
    "NVIDIA A100 80GB PCIe": 312.0,
    "NVIDIA GeForce RTX 4090": 165.2,
    "Tesla V100-SXM2-32GB": 125.0,
    "Tesla T4": 65.0,
    "AMD Instinct MI300X": 1307.4,
}
#: they look alike, and are slower, faster or a part of one
STRANGERS = (
    "Some New GPU", "", "NVIDIA", "NVIDIA A10G", "NVIDIA H20", "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
    "NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA GeForce RTX 3090 Ti", "AMD Instinct MI250X/MI250",
)  # fmt: skip


def test_peaks_are_known_or_not_never_guessed() -> None:
    for name, tflops in NAMES.items():
        low = "bf16" if "V100" not in name and "T4" not in name else "fp16"
        assert peak_flops(name, low) == tflops * 1e12, name
    for name in STRANGERS:
        assert [peak_flops(name, kind) for kind in ("bf16", "fp16", "fp32", "fp64")] == [None] * 4, name
    assert peak_flops("Tesla T4", "bf16") is None
    assert peak_flops("NVIDIA L40S", "fp64") is None
    assert peak_flops("NVIDIA H100 80GB HBM3", "int8") is None


#: in the words of `--hardware`, or as torch names them
KNOWN = ("h100", "a100", "H200", "b200", "v100", "mi300x", "NVIDIA A100-SXM4-80GB")


#: TFLOP/s of products [m, k] x [k, n], as published: of usual shapes, and the best of many (sources: `REACHED`)
USUAL = {
    "a100": {(8192, 8192, 8192): 257},
    "h100": {(8192, 8192, 8192): 720, (16384, 8192, 1280): 720, (16384, 1024, 8192): 720, (16384, 3584, 8192): 720},
    "b200": {(8192, 8192, 8192): 1672, (4096, 11008, 4096): 1562, (2048, 11008, 4096): 1448},
    "mi300x": {(16384, 8192, 7168): 620},
}
BEST = {
    "a100": {(1024, 10240, 5120): 271},
    "h100": {(2048, 2048, 13312): 795},
    "b200": {(1792, 16128, 3072): 1745},
    "mi300x": {(10240, 15360, 8192): 668},
}
#: those of FlashAttention-2 on H100, causal, head dim 128, 16k tokens in all, 16 heads (2407.08608, figure 5)
ATTENTION = {512: 191, 1024: 260, 2048: 298, 4096: 319, 8192: 333, 16384: 335}


@pytest.mark.parametrize(("tables", "bound"), [(USUAL, 0.08), (BEST, 0.08)])
def test_products_are_as_fast_as_published(tables: dict[str, dict[tuple[int, int, int], float]], bound: float) -> None:
    for device, table in tables.items():
        for (m, n, k), tflops in table.items():
            seconds = FromDataSheet(device).matmul_seconds(m, n, k, "bf16")
            assert 2e-12 * m * n * k / seconds == pytest.approx(tflops, rel=bound), (device, m, n, k)


def test_attention_is_as_fast_as_published() -> None:
    h100 = FromDataSheet("h100")
    for length, tflops in ATTENTION.items():
        heads = 16 * 16384 // length
        seconds = h100.attention_seconds(heads, length, 128, "bf16")
        assert 2e-12 * heads * length**2 * 128 / seconds == pytest.approx(tflops, rel=0.06), length
    forward, backward = (h100.attention_seconds(32, 8192, 128, "bf16", backward=kind) for kind in (False, True))
    assert backward == pytest.approx(2.5 * 370 / 322 * forward, rel=0.01)


def test_the_last_wave_of_tiles_takes_as_long_as_a_full_one() -> None:
    h100 = FromDataSheet("h100")
    one, two = (h100.matmul_seconds(12 * 128, 256 * columns, 16384, "bf16") for columns in (11, 12))  # on 132 units
    assert two - GAP == pytest.approx(2 * (one - GAP))
    experts = h100.products_seconds(20, 768, 512, 16384, "bf16")  # 12 tiles each
    assert experts - GAP == pytest.approx(2 * (one - GAP))


def test_times_by_a_data_sheet() -> None:
    """Large ones by the peaks and the efficiencies that the file states, small ones by the gap between kernels."""
    h100 = FromDataSheet("h100")
    assert (h100.name, h100.is_measured, h100.memory_bytes) == ("H100 (data sheet)", False, 80e9)
    # a few tokens: the weights are read, whatever is done with them
    assert h100.matmul_seconds(4, 16384, 16384, "bf16") == pytest.approx(2 * 16384**2 / (0.85 * 3.35e12), rel=0.05)
    assert h100.matmul_seconds(1, 1, 1, "bf16") == pytest.approx(GAP, rel=0.01)
    assert h100.memory_seconds(3.35e12) == pytest.approx(1 / 0.85, rel=1e-4)
    assert FromDataSheet("h100", memory_bandwidth=2.4e12).memory_seconds(2.4e12) == pytest.approx(1 / 0.85, rel=1e-4)
    # a gigabyte, of which a rank of eight sends 7/8 and again 7/8
    assert h100.collective_seconds("all_reduce", 8, 1e9) == pytest.approx(1.75e9 / (0.8 * 450e9), rel=0.02)
    # over two hosts of eight ranks each through eight cards at once; of ranks that are each on a host through its own
    assert h100.collective_seconds("all_reduce", 16, 1e9, hosts=2) == pytest.approx(1.875e9 / 8 / 40e9, rel=0.03)
    assert h100.collective_seconds("all_reduce", 16, 1e9, hosts=16) == pytest.approx(1.875e9 / 40e9, rel=0.01)
    assert h100.collective_seconds("all_to_all", 16, 1e9, hosts=2) == pytest.approx(0.5e9 / 40e9, rel=0.01)
    assert h100.collective_seconds("send", 2, 0) == pytest.approx(8.4e-6 + 3.4e-6)
    added = h100.collective_seconds("all_gather", 16, 0, hosts=2) - h100.collective_seconds("all_gather", 16, 0)
    assert added == pytest.approx(NETWORK.latency)


@given(st.sampled_from(KNOWN), st.sampled_from(OPERATIONS), st.integers(2, 512), st.floats(0, 1e10), st.floats(0, 1e9))
def test_more_never_takes_less(device: str, operation: str, ranks: int, held: float, more: float) -> None:
    hardware = FromDataSheet(device)
    seconds = [hardware.collective_seconds(operation, ranks, size, hosts=2) for size in (held, held + more)]
    assert seconds[0] <= seconds[1]
    m, n = 40 * ranks, int(held / 1e6)  # 1 to 160 tiles by up to 40
    shapes = (m, n, 128), (m + 1, n, 128), (m + 1, n + 1, 129)
    times = [hardware.matmul_seconds(*shape, "fp16") for shape in shapes]
    assert times == sorted(times)


def test_devices_and_dtypes_that_are_not_known() -> None:
    refusal = "has no data sheet here with memory and links; B200, H100, H800, H200, A100, V100 SXM2, MI300X have them"
    with pytest.raises(ValueError, match=f"'H10' {refusal}; did you mean H100"):
        FromDataSheet("H10")
    with pytest.raises(ValueError, match=f"'RTX 4090' {refusal}"):
        FromDataSheet("RTX 4090")  # its peaks are known, its links are not
    assert SHEETS["RTX 4090"].link is None
    with pytest.raises(
        ValueError, match=r"V100 SXM2 \(data sheet\) has no figure for products in bf16; it has fp16, fp32"
    ):
        FromDataSheet("v100").matmul_seconds(8, 8, 8, "bf16")
