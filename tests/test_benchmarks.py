"""Every benchmark runs (by default one of them, all with -m long), its cases compute the same thing, and a case that
does not is refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.fake_cuda import run_fake_ranks

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # the benchmarks are no part of the installed package

from benchmarks import (  # noqa: E402
    common,
    kernels,
    parity,
    pipeline,
    restarts,
    tensor,
    tensor_block,
    train_step,
)
from benchmarks.common import Spread  # noqa: E402
from benchmarks.tensor_cases import CASES  # noqa: E402
from benchmarks.tensor_worker import Worker  # noqa: E402
from benchmarks.workload import Workload, fuse_qkv  # noqa: E402


def smoke(name: str, tmp_path: Path, *arguments: str) -> tuple[str, dict[str, Any]]:
    """What ``python -m benchmarks.<name> --smoke`` prints, and its JSON."""
    out = tmp_path / "out.json"
    clean = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    done = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{name}", "--smoke", "--json", str(out), *arguments],
        cwd=ROOT, env={**clean, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=250,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout, json.loads(out.read_text())


def assert_same_training(result: dict[str, Any], names: set[str]) -> None:
    trajectories = result["loss_and_norm"]
    assert set(trajectories) == names
    reference = torch.tensor(trajectories["serial"])
    assert reference.shape == (train_step.CHECKED_STEPS, 2)
    assert reference[:, 0].unique().numel() == train_step.CHECKED_STEPS  # it trains
    for name, trajectory in trajectories.items():
        torch.testing.assert_close(torch.tensor(trajectory), reference, rtol=1e-4, atol=1e-4, msg=name)


@pytest.mark.long
def test_train_step(tmp_path: Path) -> None:
    names = ["serial", "serial", "colossus", "ddp-2", "colossus-data-2", "dtensor-2", "megatron-2"]
    names += ["megatron-lean-2", "colossus-tensor-2"]
    text, payload = smoke("train_step", tmp_path)
    (result,) = payload["results"]
    assert_same_training(result, {*names, "serial (again)"})
    assert all(name in text for name in names)
    compared = {(pair["case"], pair["against"]) for pair in result["comparisons"]}
    assert compared == {
        ("serial (again)", "serial"),
        ("colossus", "serial"),
        ("colossus-data-2", "ddp-2"),
        ("colossus-tensor-2", "megatron-2"),
        ("colossus-tensor-2", "megatron-lean-2"),
        ("colossus-tensor-2", "dtensor-2"),
    }
    if Path("/proc/self/clear_refs").exists():
        memory = result["memory_bytes"]
        assert set(memory) == set(names)
        # weights, gradients and two moments of AdamW in fp32, and a little for batches
        assert memory["serial"]["resident"] == pytest.approx(16 * parameters(train_step.SMOKE), rel=0.1)
        assert all(used["peak"] >= used["resident"] for used in memory.values())


def parameters(workload: Workload) -> int:
    return sum(value.numel() for value in workload.state().values())


@pytest.mark.long
def test_peers_that_shard_and_that_compute_in_bf16(tmp_path: Path) -> None:
    names = ["serial", "zero-redundancy-2", "fsdp-2", "fsdp-keep-2", "fsdp-prefetch-2"]
    names += ["colossus-zero1-2", "colossus-zero2-2", "colossus-zero3-2", "colossus-zero3-keep-2"]
    low = ["colossus-bf16", "ddp-bf16-2", "zero-redundancy-bf16-2", "fsdp-bf16-2"]
    low += ["colossus-data-bf16-2", "colossus-zero1-bf16-2", "colossus-zero3-bf16-2"]
    _, payload = smoke("train_step", tmp_path, "--cases", *names, *low)
    (result,) = payload["results"]
    trajectories = result["loss_and_norm"]
    assert set(trajectories) == {*names, *low, "serial-bf16"}
    assert_same_training({"loss_and_norm": {name: trajectories[name] for name in names}}, set(names))
    for name in low:
        assert trajectories[name] != trajectories["serial"]
        assert trajectories[name] == [pytest.approx(step, abs=1e-2) for step in trajectories["serial-bf16"]]
    if Path("/proc/self/clear_refs").exists():  # half of weights, gradients and moments, or of the moments
        held = {name: memory["resident"] for name, memory in result["memory_bytes"].items()}
        whole = 4 * parameters(train_step.SMOKE)
        assert held["fsdp-2"] == pytest.approx(2 * whole, rel=0.2)
        assert held["zero-redundancy-2"] < 3.5 * whole < held["serial"]
        few = 8 << 10  # buffers of a step's own numbers, whatever the size of the model
        assert held["colossus-zero3-2"] <= held["fsdp-2"] + few
        assert held["colossus-zero1-2"] <= held["zero-redundancy-2"] + few


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("any_model", "unpaired"),
        ("serial --recompute --no-memory", "selective"),
        ("dropout", "time / bernoulli"),
        ("generation", "decode tokens/s"),
        ("hf_loading", "MB above the weights"),
        ("moe", "experts over 4"),
        ("loaders --only tuples", "tuples, map, 2 workers"),
        ("loaders --only packed", "packed rows"),
        ("kernels", "ring of 4, fp32, documents"),
        ("plans", "rank correlation over 4 plans"),
        ("restarts", "steps redone"),
        ("serial --no-memory --precision fp32", "time / serial"),
        ("server_transport", "round trips/s"),
        ("startup", "seconds until"),
        ("versions", "time / before"),
        ("stragglers --replicas 2 --strategies all_reduce", "predicted"),
    ],
)
def test_it_runs(tmp_path: Path, name: str, words: str) -> None:
    text, payload = smoke(*name.split()[:1], tmp_path, *name.split()[1:])
    assert words in text
    assert payload


@pytest.mark.long
def test_checkpoints(tmp_path: Path) -> None:
    text, payload = smoke("checkpoints", tmp_path)
    assert [result["plan"] for result in payload["results"]] == ["tensor", "data"]
    for result in payload["results"]:
        assert set(result["seconds"]) == {"save", "load", "load, other plan", "stall"}
        assert all(set(series) == {"colossus", "torch"} for series in result["seconds"].values())
        hidden, layers, vocab = payload["sizes"]
        weights = vocab * hidden + 1024 * hidden + layers * (12 * hidden**2 + 13 * hidden)
        assert result["bytes"] == 3 * 4 * weights  # what both ranks hold is counted once
    assert "stall / save: colossus" in text


def assert_counted_is_formula(payload: dict[str, Any]) -> None:
    """In both tables, for every case of ours."""
    for name, case in payload["cases"].items():
        entries = list(case["scopes"].values())
        assert len(entries) == (3 if name.startswith(("2d", "2.5d", "3d")) else 0)
        entries += [case] if case["formula"] else []
        assert bool(case["formula"]) is not name.startswith(("plain", "dtensor"))
        for entry in entries:
            assert entry["counted"]["bytes"] > 0
            assert entry["counted"]["calls"] == entry["formula"]["calls"]
            assert entry["counted"]["bytes"] == pytest.approx(entry["formula"]["bytes"], rel=1e-9)


@pytest.mark.long
@pytest.mark.parametrize("names", [["plain", "1d-2", "2d-2x2", "dtensor-2"], []], ids=len)
def test_tensor(tmp_path: Path, names: list[str]) -> None:
    """Of four cases, and of all that a smoke run has."""
    text, payload = smoke("tensor", tmp_path, *(["--cases", *names] if names else []))
    cases = payload["cases"]
    assert list(cases) == (names or ["plain", "plain (again)", *tensor.SMOKE_CASES[2:]])
    assert all(name in text for name in cases)
    assert_counted_is_formula(payload)
    assert cases["plain"]["counted"] == {"calls": 0, "bytes": 0}
    assert cases["dtensor-2"]["counted"] == cases["1d-2"]["counted"]
    if not names:
        assert cases["2.5d-2x2x2"]["owed"]["matrices"] > 0
    assert all(case["saved"] < cases["plain"]["saved"] for case in cases.values() if case["ranks"] > 1)
    hidden = tensor.SMOKE.hidden
    assert cases["plain"]["parameters"] == 12 * hidden**2 + 13 * hidden
    assert 3 * hidden**2 < cases["2d-2x2"]["parameters"] < 3 * hidden**2 + 13 * hidden
    if Path("/proc/self/clear_refs").exists():
        assert all(case["peak"] > 4 * case["parameters"] for case in cases.values())


BENCH = tensor.Bench(tensor.SMOKE, blocks=1, steps=1, microbatches=2)


@pytest.mark.parametrize("name", ["2d-2x2", "1d-sequence-2"])
def test_a_block_whose_gradients_are_not_summed_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_block, "gradient_sum_axes", lambda parameter, context: ())
    with pytest.raises(RuntimeError, match=rf"{name}: the gradient of .* differs from that of plain by"):
        tensor.measure(BENCH, {"plain": CASES["plain"], name: CASES[name]}, with_memory=False)


def test_a_block_that_sends_more_than_its_formula_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    formula = tensor.block_traffic
    monkeypatch.setattr(tensor, "block_traffic", lambda *sizes: formula(*sizes) * 2)
    with pytest.raises(RuntimeError, match=r"1d-2: rank 0 sent .* MB in 4 calls, but the formula says .* in 8"):
        tensor.measure(BENCH, {"plain": CASES["plain"], "1d-2": CASES["1d-2"]}, with_memory=False)


@pytest.mark.long
def test_pipeline(tmp_path: Path) -> None:
    names = ["serial", "torch-1f1b", "colossus-1f1b", "colossus-zb-h1"]
    text, payload = smoke("pipeline", tmp_path)
    (result,) = payload["results"]
    assert set(result["gradient_differences"]) == set(names)
    assert all(name in text for name in names)
    for part in ("passes", "step"):
        assert all(len(result["seconds"][part][name]) == 2 for name in names)
        assert set(result["ratios"][part]["colossus-1f1b"]) == {"serial", "torch-1f1b"}


def test_a_pipeline_that_computes_something_else_is_refused() -> None:
    wanted = {"a": np.ones(2, np.float32), "b": np.full(2, 1e-3, np.float32)}
    close = [(1.5, {"a": wanted["a"]}), (0.5, {"b": wanted["b"] * np.float32(1 + 1e-6)})]
    assert pipeline.check_passes("ours", close, (2.0, wanted)) == pytest.approx(1e-6, rel=0.2)
    with pytest.raises(RuntimeError, match=r"ours: the sum of losses is 1\.5, but serial has 2\.0"):
        pipeline.check_passes("ours", [(1.5, wanted)], (2.0, wanted))
    with pytest.raises(RuntimeError, match=r"ours: gradients of other parameters: \['b'\]"):
        pipeline.check_passes("ours", [(2.0, {"a": wanted["a"]})], (2.0, wanted))
    for bad in (1.0001, float("nan")):
        with pytest.raises(RuntimeError, match="ours: the gradient of b differs from that of serial by"):
            pipeline.check_passes("ours", [(2.0, {**wanted, "b": wanted["b"] * np.float32(bad)})], (2.0, wanted))


@pytest.mark.long
def test_bubble(tmp_path: Path) -> None:
    text, payload = smoke("bubble", tmp_path, "--milliseconds", "10")
    results = {result["schedule"]: result for result in payload["results"]}
    assert set(results) == {"gpipe", "1f1b", "interleaved", "zb-h1", "zb-v"}
    assert all(name in text for name in results)
    for result in results.values():
        assert result["peaks"] == result["simulated_peaks"]
        assert all(makespan > result["simulated_makespan"] for makespan in result["makespans"])
    assert results["1f1b"]["peaks"] == [2, 1]
    assert results["zb-h1"]["simulated_bubble"] < 0.5 * results["1f1b"]["simulated_bubble"]


@pytest.mark.long
def test_sequence(tmp_path: Path) -> None:
    text, payload = smoke("sequence", tmp_path)
    assert "ulysses x 4" in text
    rows = {(row["mode"], row["ranks"]): row for row in payload["attention"]}
    for (mode, ranks), row in rows.items():
        assert row["gap"] < 1e-5
        assert len(row["counted"]) == ranks
        if mode != "ulysses":
            assert sum(counted["scores"] for counted in row["counted"]) == 8 * 128 * 129 // 2
    for row in payload["masked"]:
        assert row["gap"] < 1e-5
        assert row["name"] == "dense mask" or sum(count["scores"] for count in row["counted"]) >= row["pairs"]
    one, four = payload["train"]["x1"], payload["train"]["x4"]
    assert one["losses"] == pytest.approx(four["losses"], rel=1e-5)


def test_a_case_that_computes_something_else_is_refused() -> None:
    reference = [(2.0, 1.0), (1.5, 0.9)]
    train_step.check({"serial": reference, "same": [(2.0, 1.0), (1.50001, 0.9)]})
    with pytest.raises(RuntimeError, match=r"other: loss 1\.600000 at step 2"):
        train_step.check({"serial": reference, "other": [(2.0, 1.0), (1.6, 0.9)]})
    with pytest.raises(RuntimeError, match=r"other: gradient norm 1\.100000 at step 1"):
        train_step.check({"serial": reference, "other": [(2.0, 1.1), (1.5, 0.9)]})
    with pytest.raises(RuntimeError, match="other: loss nan"):
        train_step.check({"serial": reference, "other": [(float("nan"), 1.0), (1.5, 0.9)]})


def test_a_case_in_bf16_is_held_to_the_serial_one_in_bf16() -> None:
    serial, low = [(2.0, 1.0)], [(2.01, 1.005)]
    train_step.check({"serial": serial, "serial-bf16": low, "ddp-bf16-2": [(2.02, 1.01)], "ddp-2": [(2.00001, 1.0)]})
    for name, off in (("ddp-bf16-2", [(2.01, 0.5)]), ("serial-bf16", [(2.1, 1.0)]), ("ddp-2", low)):
        with pytest.raises(RuntimeError, match=f"{name}: "):
            train_step.check({"serial": serial, "serial-bf16": low, name: off})


@pytest.mark.parametrize("ways", [1, 2, 4])
def test_a_fused_weight_splits_into_whole_heads(ways: int) -> None:
    workload = Workload(hidden=16, layers=1, heads=4, tokens=4, batch=2, vocab=8)
    state = workload.state()
    fused = fuse_qkv(state, interleave=ways)["blocks.0.attention.qkv.weight"]
    for rank, part in enumerate(fused.chunk(ways)):
        query, key, value = part.chunk(3)
        for name, held in (("query", query), ("key", key), ("value", value)):
            whole = state[f"blocks.0.attention.qkv.{name}.weight"]
            assert torch.equal(held, whole.chunk(ways)[rank])


def test_blocks_alternate_and_ratios_are_taken_within_a_block() -> None:
    calls: list[str] = []
    seconds = {"a": iter([1.0, 10.0, 2.0]), "b": iter([2.0, 20.0, 6.0])}

    def runner(name: str) -> float:
        calls.append(name)
        return next(seconds[name])

    series = common.alternate({name: lambda name=name: runner(name) for name in seconds}, 3)  # type: ignore[misc]
    assert calls == ["a", "b", "b", "a", "a", "b"]
    assert common.ratio(series, "b", "a") == Spread(2.0, 2.0, 2.5)


@pytest.mark.long
def test_sparse_tables(tmp_path: Path) -> None:
    text, payload = smoke("sparse_tables", tmp_path)
    assert "tables MB" in text
    rows = {row["method"]: row for row in payload["rows"]}
    ours = [rows[name] for name in ("hybrid", "owners", "gathered rows", "all_reduce, dense")]
    assert len({round(row["loss"], 5) for row in ours}) == 1  # ways change no result
    assert rows["owners"]["counted"] < rows["gathered rows"]["counted"] < rows["all_reduce, dense"]["counted"] / 5
    assert rows["owners"]["table_mb"] == pytest.approx(rows["all_reduce, dense"]["table_mb"] / 4, rel=0.01)
    assert rows["DDP, sparse=True"]["loss"] == pytest.approx(rows["DDP, dense"]["loss"], rel=1e-5)


def test_seconds_of_a_restart_are_those_behind_the_death_of_the_slowest_rank() -> None:
    first = [(0.0, "started"), (1.0, "python"), (1.1, "python"), (2.0, "step"), (2.0, "step"), (3.0, "death")]
    launcher = [(3.1, "noticed"), (3.6, "noticed"), (3.7, "gone"), (3.9, "started"), (3.95, "started")]
    names = ("python", "imported", "built", "resumed", "step")
    ranks = [(4.0 + number + late, name) for number, name in enumerate(names) for late in (0.0, 0.5)]
    end = [(9.1, "step"), (9.7, "step"), (10.0, "noticed"), (10.0, "gone")]
    moments = [{"name": name, "time": time} for time, name in (*first, *launcher, *ranks, *end)]
    parts = restarts.parts_of(moments)
    expected = {"noticed": 0.1, "all gone": 0.6, "started": 0.2, "python": 0.6, "imports": 1.0, "built": 1.0}
    assert parts == pytest.approx(expected | {"resumed": 1.0, "first step": 1.0, "total": 5.5})


def test_parity_sees_a_gradient_that_is_halved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parity, "WORKLOAD", Workload(hidden=16, layers=2, heads=2, tokens=8, batch=4))
    monkeypatch.setattr(parity, "PLANS", {"tensor 2": (2, dict(tensor=2), {})})
    differences = parity.compare_plans(4)
    assert differences["tensor 2"] < 1e-12
    assert differences[parity.CONTROL] > 1e-9
    drawn = parity.draw(differences, 4)
    assert drawn.count("<circle") == 2


def ring_and_whole(attention: kernels.Attention) -> tuple[kernels.OneProcessRing, list[torch.Tensor]]:
    q, k, v, dout = (x.double() for x in kernels.draw(attention))
    documents = kernels.documents_of(attention, torch.device("cpu"))
    mask = None if documents is None else kernels.mask_of(documents)
    ring = kernels.OneProcessRing(attention.ranks, q, k, v, dout, documents)
    return ring, kernels.whole_attention(q, k, v, dout, mask)


@pytest.mark.parametrize("num_documents", [1, 4])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_ring_in_one_process_is_the_whole_attention(ranks: int, num_documents: int) -> None:
    ring, whole = ring_and_whole(
        kernels.Attention("fp64", ranks, 30 * ranks, num_documents, heads=6, kv_heads=2, head_dim=8)
    )
    gaps = ring.gaps(whole)
    assert set(gaps) == {"output", "dq", "dk", "dv"}
    assert max(gaps.values()) < 1e-13


def test_a_ring_that_leaves_out_a_block_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    attention = kernels.Attention("bf16", 3, 60, heads=2, kv_heads=2, head_dim=8)
    backward = kernels.ring_attention.block_backward

    def leave_out(dout: Any, q: Any, *rest: Any, **options: Any) -> Any:
        dq, dk, dv = backward(dout, q, *rest, **options)
        return dq, dk * options["causal"], dv

    monkeypatch.setattr(kernels.ring_attention, "block_backward", leave_out)
    with pytest.raises(AssertionError, match=r"dk is off by 0\.\d+ of its largest number, 0\.02 is allowed"):
        kernels.check_ring(attention, torch.device("cpu"))


def run_blocks_on_a_device(rank: int, names: list[str]) -> list[tuple[int, bool]]:
    """Return the number of elements of x of each case, and whether all was made and stayed on the device."""
    device, results = torch.device("cuda", 0), []
    workload = Workload(hidden=16, layers=1, heads=4, tokens=8, batch=4, vocab=12, device="cuda")
    for name in names:
        worker = Worker(CASES[name], workload, False, rank)
        assert worker.block(1) > 0
        assert (worker.peak() or 0) > 0
        tensors = [*worker.run.module.parameters(), worker.run.x, worker.run.x.grad]
        results.append((worker.run.x.numel(), all(x is not None and x.device == device for x in tensors)))
        worker.close()
    return results


@pytest.mark.long
def test_blocks_run_on_a_device_that_does_not_exist() -> None:
    (results,) = run_fake_ranks(4, run_blocks_on_a_device, ["1d-4", "2d-2x2"])
    assert results == [(4 * 8 * 16, True), (8 * 16, True)]
