"""The sections of scripts/test-gpu that compare with torch: on the CPU, and on CUDA devices that do not exist."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.fake_cuda import run_fake_ranks

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # the benchmarks are no part of the installed package

from benchmarks.gpu.one_process_ring import OneProcessRing  # noqa: E402
from benchmarks.gpu.sections import blocks, kernels, step  # noqa: E402
from benchmarks.gpu.sections.kernels import Attention  # noqa: E402
from benchmarks.sequence_cases import AttentionCase  # noqa: E402
from benchmarks.tensor_cases import CASES, PLAIN  # noqa: E402
from benchmarks.tensor_worker import Worker  # noqa: E402
from benchmarks.workload import Workload  # noqa: E402
from colossus.context.local_ranks import LocalRanks, RanksFailed  # noqa: E402
from colossus.sequence_parallel import ring_attention  # noqa: E402

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


# -- the ring in one process ----------------------------------------------------------------------------------


def ring_and_whole(attention: Attention) -> tuple[OneProcessRing, list[torch.Tensor]]:
    q, k, v, dout = (x.double() for x in kernels.draw(attention))
    documents = kernels.documents_of(attention, CPU)
    mask = None if documents is None else kernels.mask_of(documents)
    in_ring = OneProcessRing(attention.ranks, q, k, v, dout, documents)
    return in_ring, kernels.whole_attention(q, k, v, dout, mask)


@pytest.mark.parametrize("num_documents", [1, 4])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_ring_in_one_process_is_the_whole_attention(ranks: int, num_documents: int) -> None:
    attention = Attention("fp64", ranks, 30 * ranks, num_documents, heads=6, kv_heads=2, head_dim=8)
    in_ring, whole = ring_and_whole(attention)
    gaps = in_ring.gaps(whole)
    assert set(gaps) == {"output", "dq", "dk", "dv"}
    assert max(gaps.values()) < 1e-13


def test_a_block_that_is_left_out_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    attention = Attention("fp64", 3, 60, heads=2, kv_heads=2, head_dim=8)
    in_ring, whole = ring_and_whole(attention)
    real = ring_attention.block_backward

    def without_one(dout: Any, q: Any, *rest: Any, **options: Any) -> Any:
        dq, dk, dv = real(dout, q, *rest, **options)
        return dq, dk * options["causal"], dv

    monkeypatch.setattr(ring_attention, "block_backward", without_one)
    gaps = in_ring.gaps(whole)
    assert gaps["dk"] > 0.01
    assert max(gaps["output"], gaps["dq"], gaps["dv"]) < 1e-13
    assert kernels.TOLERANCES["bf16"] < 0.1
    with pytest.raises(AssertionError, match=r"dk is off by 0\.\d+ of its largest number, allowed are 0.02"):
        kernels._attention(replace(attention, dtype="bf16"), CPU, 0.0)


# -- a step beside bare torch ---------------------------------------------------------------------------------


def test_a_loss_that_is_not_torchs_fails() -> None:
    wanted = [(4.0, 1.0), (3.9, 1.1)]
    step.check([(4.0003, 1.0), (3.9, 1.1)], wanted, 1e-4)
    with pytest.raises(AssertionError, match=r"gradient norm 1.101000 at step 2, but bare torch has 1.100000"):
        step.check([(4.0, 1.0), (3.9, 1.101)], wanted, 1e-4)
    with pytest.raises(AssertionError, match="loss nan at step 1"):
        step.check([(float("nan"), 1.0), (3.9, 1.1)], wanted, 1e-2)


# -- on a device ----------------------------------------------------------------------------------------------

SMALL = Workload(hidden=16, layers=1, heads=2, tokens=8, batch=2, vocab=12, device="cuda")


def blocks_on_device(rank: int, names: list[str]) -> list[tuple[int, bool]]:
    """Body of a rank of four: elements of x, and whether all was made and stayed on the device."""
    out = []
    for name in names:
        worker = Worker(CASES[name], replace(SMALL, batch=4, heads=4), False, rank)
        assert worker.block(1) > 0
        assert (worker.peak() or 0) > 0
        tensors = [*worker.run.module.parameters(), worker.run.x, worker.run.x.grad]
        out.append((worker.run.x.numel(), all(x is not None and x.device == CUDA for x in tensors)))
        worker.close()
    for mode in ("ring", "ulysses"):
        attention = AttentionCase(replace(SHAPE, device="cuda:0"), mode, rank, 4)
        assert attention.block(1) > 0
        assert len(attention.result()) == 4
        attention.close()
    return out


SHAPE = blocks.Shape(tokens=32, heads=4, kv_heads=4, head_dim=8)


@pytest.mark.long
def test_blocks_run_on_a_device() -> None:
    (found,) = run_fake_ranks(4, blocks_on_device, ["1d-4", "2d-2x2"])
    whole = 4 * SMALL.tokens * SMALL.hidden
    assert found == [(whole, True), (whole // 4, True)]
    (found,) = run_fake_ranks(1, lambda rank: Worker(CASES[PLAIN], SMALL, False, rank).run.dy.device)
    assert found == CUDA


# -- as the runner runs them ----------------------------------------------------------------------------------


@pytest.mark.long
def test_what_a_block_sends_has_to_be_what_the_formula_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """All by the same ranks, which build one case after the other."""
    started: list[int] = []
    real_start = LocalRanks.__init__
    monkeypatch.setattr(
        LocalRanks, "__init__", lambda self, world, *more, **options: (
            started.append(world), real_start(self, world, *more, **options)
        )[1],
    )  # fmt: skip
    with closing(blocks.Stage(CPU, blocks.ON_CPU, 0.0)) as stage:
        figures = blocks._block(stage, "1d-2")
        assert figures is not None
        assert figures["off by"] < 1e-5
        assert figures["MB sent"] == pytest.approx(4 * 4 * 8 * 16 * 64 / 1e6)  # 4 all-reduces of x
        figures = blocks._attention(stage, "ring", 2)
        assert figures is not None
        assert figures["time / one process"] > 0
        with monkeypatch.context() as wrong:
            real = blocks.block_traffic
            wrong.setattr(blocks, "block_traffic", lambda case, workload: real(case, workload, 2))
            with pytest.raises(RuntimeError, match=r"1d-2: rank 0 sent .* MB in 4 calls, but the formula says .* in 8"):
                blocks._block(stage, "1d-2")
        assert started == [1, 2]
        with pytest.raises(RanksFailed, match="no_such_method"):
            stage.ranks.ask("no_such_method")
        assert blocks._block(stage, "1d-sequence-2") is not None
        assert started == [1, 2, 2]


@pytest.mark.long
def test_all_sections_of_speed_run_without_a_gpu(tmp_path: Path) -> None:
    file = tmp_path / "gpu.json"
    sections = ("feeding", "kernels", "step", "blocks")
    command = [sys.executable, "-m", "benchmarks.gpu", "--device", "cpu", "--budget", "240", "--only", *sections]
    done = subprocess.run(
        [*command, "--json", str(file), "--logs", str(tmp_path / "logs")], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout
    rows = {
        (row["section"], row["case"] if "case" in row else row["name"]): row
        for row in json.loads(file.read_text())["rows"]
    }
    left_out = {name for (section, name), row in rows.items() if row["result"] == "left out"}
    assert left_out == {variant.name for variant in step.VARIANTS} - {"fp32", "bf16"}
    assert {section for section, _ in rows} == {*sections}
