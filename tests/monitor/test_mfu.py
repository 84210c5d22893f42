"""Utilisation and peak memory, in rows and on the display."""

from __future__ import annotations

import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.launched.fake_engine import FakeEngine

from colossus.config import load_config
from colossus.engine.fit import fit
from colossus.monitor.display import Display
from colossus.monitor.metrics import Metrics, peak_memory
from colossus.monitor.mfu import Utilisation, flops_per_token

H100 = "NVIDIA H100 80GB HBM3"
CUDA = torch.device("cuda", 0)
MODEL = dict(type="GPT", num_layers=1, hidden_size=8, num_heads=2, vocab_size=11, seq_len=6)


def engine_of(*, exact: bool = True, device: torch.device = CUDA, model: Any = MODEL, **parallel: int) -> Any:
    """What is read of one."""
    sizes = {"data": 1, "tensor": 1, **parallel}
    world = sizes["data"] * sizes["tensor"]
    config = load_config({"model": model, "train": {"global_batch_size": 1, "precision": "bf16"}}, nproc=1)
    context = SimpleNamespace(world_size=world, size=lambda name: sizes[name])
    return SimpleNamespace(device=device, config=config, context=context, strategy=SimpleNamespace(exact=exact))


@pytest.fixture
def an_h100(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The CPU's torch takes itself for one with a GPU, whose allocator has these figures."""
    stats = {"allocated_bytes": {"all": {"peak": 700}}, "reserved_bytes": {"all": {"peak": 900}}}
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: H100)
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda device: stats)
    return stats


def test_utilisation_is_of_all_devices_whose_tokens_are_counted(
    an_h100: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    flops = flops_per_token(MODEL)
    assert flops
    whole = Utilisation.of(engine_of(data=3, tensor=2))
    assert whole.at(1e9) == pytest.approx(1e9 * flops / (6 * 989.5e12), rel=1e-12)
    one_replica = Utilisation.of(engine_of(data=3, tensor=2, exact=False))
    assert one_replica.at(1e9) == pytest.approx(1e9 * flops / (2 * 989.5e12), rel=1e-12)
    assert Utilisation.of(engine_of(device=torch.device("cpu"))).at(1e9) is None
    assert Utilisation.of(engine_of(model=None)).at(1e9) is None
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3 MIG 1g.10gb")
    assert Utilisation.of(engine_of()).at(1e9) is None


def test_peak_memory_is_that_of_the_allocator(an_h100: dict[str, Any]) -> None:
    assert peak_memory(CUDA) == (700, 900)
    an_h100.clear()  # before the first tensor
    assert peak_memory(CUDA) == (0, 0)
    resident, reserved = peak_memory(torch.device("cpu"))
    assert resident > 1e7
    assert reserved is None


def test_rows_and_lines_on_a_gpu_have_utilisation_and_memory(an_h100: dict[str, Any], tmp_path: Path) -> None:
    stream, path = io.StringIO(), tmp_path / "metrics.jsonl"
    engine = FakeEngine(steps=3, precision="bf16")
    of_model = engine_of()
    engine.device = CUDA
    engine.config = engine.config.model_copy(update={"model": of_model.config.model})
    fit(engine, [Metrics(path), Display(tmp_path, stream)])
    flops = Utilisation.of(of_model).flops_per_token
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(rows) == 3
    for row in rows:
        assert (row["memory_bytes"], row["memory_reserved_bytes"]) == (700, 900)
        assert row["mfu"] == pytest.approx(row["tokens_per_second"] * flops / 989.5e12, rel=1e-12)
    assert "MFU 0.0%" in stream.getvalue()
    assert "MFU N/A" not in stream.getvalue()
