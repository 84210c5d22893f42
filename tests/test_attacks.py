"""What a stranger may put in the way: each case does nothing, or is refused."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
import transformers
from helpers.ranks import run_ranks
from torch.distributed import TCPStore

import colossus
from colossus.checkpoint.errors import DamagedCheckpoint
from colossus.checkpoint.manifest import MANIFEST, Chunk, FileEntry, Manifest, TensorEntry, read_manifest
from colossus.config import load_config
from colossus.context.parallel_context import ParallelContext
from colossus.convert.hf_model import hf_model
from colossus.launch import memory_folder, run_folder
from colossus.launch.agent import _open_store

#: chunks of a tensor [4, 6] in float32, in a file of 96 bytes
CRAFTED = {
    "two overlap, and a gap is as large": [(0, (0, 0), (2, 6)), (48, (1, 0), (2, 6))],
    "one is beyond the tensor": [(0, (0, 0), (2, 6)), (48, (3, 0), (2, 6))],
    "one begins before the tensor": [(0, (0, 0), (4, 6)), (0, (-2, 0), (2, 6))],
    "one is beyond its file": [(0, (0, 0), (2, 6)), (64, (2, 0), (2, 6))],
    "one begins before its file": [(0, (0, 0), (2, 6)), (-48, (2, 0), (2, 6))],
}


def manifest_with(chunks: list[tuple[int, tuple[int, int], tuple[int, int]]], folder: Path) -> None:
    entry = TensorEntry("float32", (4, 6), tuple(Chunk("rank-0", *chunk) for chunk in chunks))
    manifest = Manifest(1, 0.0, {}, {}, {}, {"rank-0": FileEntry(96, 0)}, {"model/w": entry}, {}, {})
    (folder / MANIFEST).write_bytes(manifest.to_bytes())


@pytest.mark.parametrize("case", CRAFTED)
def test_a_crafted_manifest_is_refused(case: str, tmp_path: Path) -> None:
    """Else a load returns memory that was never written, or the bytes of another tensor."""
    manifest_with(CRAFTED[case], tmp_path)
    with pytest.raises(DamagedCheckpoint, match="cannot be understood"):
        read_manifest(tmp_path)
    manifest_with([(0, (0, 0), (4, 2)), (32, (0, 2), (2, 4)), (64, (2, 2), (2, 4))], tmp_path)
    assert len(read_manifest(tmp_path).tensors["model/w"].chunks) == 3


def test_links_in_shared_memory_are_not_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shared, private = tmp_path / "shm", tmp_path / "private"
    for folder in (shared, private, shared / "colossus-memory-7-real"):
        folder.mkdir()
    (private / "notes").write_text("mine")
    (shared / "colossus-memory-7-link").symlink_to(private)
    (shared / "colossus-memory-7-lock").mkdir()
    (shared / "colossus-memory-7-lock" / "launcher.lock").symlink_to(private / "new")
    monkeypatch.setattr(memory_folder, "HOST_MEMORY", shared)
    memory_folder._remove_left_over("colossus-memory-7-")
    assert [path.name for path in private.iterdir()] == ["notes"]
    assert sorted(path.name for path in shared.iterdir()) == ["colossus-memory-7-link", "colossus-memory-7-lock"]
    (shared / "colossus-memory-7-other").mkdir()
    monkeypatch.setattr(os, "getuid", lambda: -1)  # it belongs to somebody else
    memory_folder._remove_left_over("colossus-memory-7-")
    assert (shared / "colossus-memory-7-other").exists()


def test_the_store_of_one_node_is_no_way_in() -> None:
    store = _open_store("127.0.0.1", only_here=True)
    store.set("key", "value")
    assert TCPStore("127.0.0.1", store.port, is_master=False).get("key") == b"value"
    if sys.platform == "linux":  # any address of 127/8 is this machine's
        with pytest.raises(ConnectionRefusedError), socket.socket() as stranger:
            stranger.connect(("127.0.0.2", store.port))


def test_credentials_are_not_written_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    address = "https://ada:s3cret@tracker.example/runs?user=x@y"
    monkeypatch.setattr(sys, "argv", ["colossus", f"model.address={address}"])

    def model(address: str) -> Any:
        raise NotImplementedError

    config = load_config(dict(model=dict(type=model, address=address)), nproc=1)
    run_folder.write_start(tmp_path, config)
    written = "".join(path.read_text() for path in tmp_path.iterdir())
    assert "s3cret" not in written
    assert written.count("https://***@tracker.example/runs?user=x@y") == 2
    assert config.model is not None
    assert config.model.options["address"] == address


def build_foreign(context: ParallelContext, config: dict[str, Any]) -> tuple[str, bool, str]:
    model: Any = colossus.build(lambda: hf_model(config), context)
    return type(model).__module__, hasattr(model.config, "auto_map"), model.config._attn_implementation


def test_a_foreign_config_does_not_choose_code() -> None:
    config = transformers.LlamaConfig(
        hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, vocab_size=16
    ).to_dict()
    choice = dict(auto_map={"AutoModelForCausalLM": "evil--modeling.Evil"}, attn_implementation="stranger/kernels")
    ((module, has_code, attention),) = run_ranks(1, build_foreign, {**config, **choice})
    assert module.startswith("transformers.")
    assert not has_code
    assert attention in ("sdpa", "eager")
