"""A folder of Megatron-Core's GPT, in the layout of its ``torch_dist``, in our models under a plan; what is refused.

The folders are written here: stacked layers, a chunk for each layer and tensor rank, arguments in ``common.pt``.
"""

from __future__ import annotations

import argparse
import enum
import io
import json
import os
import pickle
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.foreign_weights import PLANS, TOKENS, VOCABULARY, batch, train_from
from helpers.long import but
from helpers.ranks import run_ranks
from torch import Tensor, nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from colossus.checkpoint import CheckpointError, read_state_dict

HIDDEN, HEADS, WIDE, PADDED, LAYERS, RANKS = 24, 4, 20, 40, 2, 2
HEAD_DIM = 8  # kv_channels, not hidden / heads


class Attention(nn.Module):
    def __init__(self, groups: int, bias: bool) -> None:
        super().__init__()
        self.groups = groups
        self.linear_qkv = nn.Linear(HIDDEN, (HEADS + 2 * groups) * HEAD_DIM, bias=bias)
        self.linear_proj = nn.Linear(HEADS * HEAD_DIM, HIDDEN, bias=bias)

    def forward(self, x: Tensor, is_rotary: bool) -> Tensor:
        per_group = HEADS // self.groups
        mixed = self.linear_qkv(x).unflatten(-1, (self.groups, (per_group + 2) * HEAD_DIM))
        q, k, v = mixed.split([per_group * HEAD_DIM, HEAD_DIM, HEAD_DIM], dim=-1)
        q, k, v = (part.flatten(2).unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2) for part in (q, k, v))
        if is_rotary:
            q, k = rotated(q), rotated(k)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.linear_proj(out.transpose(1, 2).flatten(2))


def rotated(x: Tensor) -> Tensor:
    """Return x [.., tokens, head_dim], its halves turned by their position (``_rotate_half``)."""
    angles = torch.outer(
        torch.arange(x.shape[-2]).double(), 10000.0 ** -(torch.arange(0, HEAD_DIM, 2).double() / HEAD_DIM)
    )
    angles = torch.cat([angles, angles], -1)
    first, second = x.chunk(2, -1)
    return x * angles.cos() + torch.cat([-second, first], -1) * angles.sin()


class Layer(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.is_llama = kind == "llama"
        norm, bias = (nn.RMSNorm, False) if self.is_llama else (nn.LayerNorm, True)
        self.self_attention = Attention(2 if self.is_llama else HEADS, bias)
        self.mlp = nn.ModuleDict(
            dict(
                linear_fc1=nn.Linear(HIDDEN, WIDE * (1 + self.is_llama), bias=bias),
                linear_fc2=nn.Linear(WIDE, HIDDEN, bias=bias),
            )
        )
        self.input_layernorm, self.pre_mlp_layernorm = (norm(HIDDEN, eps=1e-5) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attention(self.input_layernorm(x), self.is_llama)
        wide = self.mlp.linear_fc1(self.pre_mlp_layernorm(x))
        if self.is_llama:
            gate, value = wide.chunk(2, -1)
            return x + self.mlp.linear_fc2(F.silu(gate) * value)
        return x + self.mlp.linear_fc2(F.gelu(wide))


class Megatron(nn.Module):
    """A GPT of Megatron's, written from its layout: its Llama, or its GPT with learned positions and a tied head."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        norm = nn.RMSNorm if kind == "llama" else nn.LayerNorm
        self.embedding = nn.ModuleDict(dict(word_embeddings=nn.Embedding(PADDED, HIDDEN)))
        if kind == "gpt":
            self.embedding.position_embeddings = nn.Embedding(TOKENS, HIDDEN)
        self.decoder = nn.ModuleDict(
            dict(
                layers=nn.ModuleList(Layer(kind) for _ in range(LAYERS)),
                final_layernorm=norm(HIDDEN, eps=1e-5),
            )
        )
        if kind == "llama":
            self.output_layer = nn.Linear(HIDDEN, PADDED, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        """Return the logits of the words, without those that pad the vocabulary."""
        x = self.embedding.word_embeddings(ids)
        if hasattr(self.embedding, "position_embeddings"):
            x = x + self.embedding.position_embeddings.weight
        for layer in self.decoder.layers:
            x = layer(x)
        head = self.output_layer if hasattr(self, "output_layer") else self.embedding.word_embeddings
        return F.linear(self.decoder.final_layernorm(x), head.weight[:VOCABULARY])


def megatron(kind: str) -> Megatron:
    torch.manual_seed(3)
    model = Megatron(kind).double()
    for name, parameter in model.named_parameters():
        if name.endswith("bias") or "norm" in name:
            nn.init.normal_(parameter, float("norm.weight" in name), 0.2)
    return model


# -- the folder ----------------------------------------------------------------------------------------------


class Stacked:
    """The shards of a tensor [layers, ..], each [1, ..] of a layer and a tensor rank, as Megatron hands them to DCP."""

    def __init__(self, values: list[Tensor], dim: int | None, parts: int) -> None:
        self.shape, self.shards = torch.Size([len(values), *values[0].shape]), {}
        for layer, value in enumerate(values):
            offset = 0
            for piece in value.chunk(parts, dim) if dim is not None else [value]:
                start = [layer] + [offset * (dim == axis) for axis in range(value.dim())]
                self.shards[tuple(start)] = piece.unsqueeze(0).contiguous()
                offset += piece.shape[dim or 0]

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        return [
            WriteItem(
                MetadataIndex(fqn, torch.Size(start)),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    ChunkStorageMetadata(torch.Size(start), shard.shape),
                    TensorProperties.create_from_tensor(shard),
                    self.shape,
                ),
            )
            for start, shard in self.shards.items()
        ]


class Planner(DefaultSavePlanner):
    """What ``MCoreSavePlanner`` does: shards by their places, bytes as they are."""

    def lookup_object(self, index: MetadataIndex) -> Any:
        value = self.state_dict[index.fqn]
        return value.shards[tuple(index.offset)] if isinstance(value, Stacked) else super().lookup_object(index)

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        return object if isinstance(object, io.BytesIO) else super().transform_object(write_item, object)


#: the dim that tensor ranks share (``tensor_parallel_layers_axis_map``)
SPLIT = {"linear_qkv": 0, "linear_fc1": 0, "linear_proj.weight": 1, "linear_fc2.weight": 1}
FUSED = {
    "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
}


def tensors_of(model: Megatron, *, is_stacked: bool = True) -> dict[str, Any]:
    """Return the tensors by their keys, stacked or by layer."""
    outside = {name: value.detach() for name, value in model.named_parameters() if ".layers." not in name}
    state: dict[str, Any] = dict(outside)
    by_layer = [{name: value.detach() for name, value in layer.named_parameters()} for layer in model.decoder.layers]
    for name in by_layer[0]:
        key = next((new + name.removeprefix(old) for old, new in FUSED.items() if name.startswith(old)), name)
        dim = next((dim for part, dim in SPLIT.items() if part in key and "layer_norm" not in key), None)
        if is_stacked:
            parts = RANKS * (2 if "linear_fc1" in key and model.decoder.layers[0].is_llama else 1)
            state[f"decoder.layers.{key}"] = Stacked([layer[name] for layer in by_layer], dim, parts)
        else:
            state |= {f"decoder.layers.{number}.{key}": layer[name] for number, layer in enumerate(by_layer)}
    return state


class AttnBackend(enum.Enum):
    auto = 5


def write(folder: Path, state: dict[str, Any], **arguments: Any) -> Path:
    """Write a folder as Megatron does: weights, an optimizer's state, bytes of other state, arguments in a pickle."""
    extra = io.BytesIO()
    torch.save([torch.ones(2)], extra)
    others = {
        "optimizer.state.exp_avg.decoder.layers.mlp.linear_fc2.weight": torch.ones(2, 3),
        "chained_1.optimizer.state.exp_avg.output_layer.weight": torch.ones(3),
        "decoder.layers.self_attention.linear_qkv._extra_state/shard_0_2": extra,
        "rng_state/shard_0_1": io.BytesIO(b"no tensor"),
    }
    dcp.save({**state, **others}, checkpoint_id=folder, planner=Planner(), no_dist=True)
    name = "megatron.core.dist_checkpointing.strategies.torch"
    module = types.ModuleType(name)
    module.MCoreMetadata = type("MCoreMetadata", (Metadata,), {"__module__": name})  # type: ignore[attr-defined]
    backend = types.ModuleType("megatron.core.transformer.enums")
    AttnBackend.__module__, backend.AttnBackend = backend.__name__, AttnBackend  # type: ignore[attr-defined]
    modules = {"megatron": types.ModuleType("megatron"), name: module, backend.__name__: backend}
    sys.modules.update(modules)
    try:
        metadata = pickle.loads((folder / ".metadata").read_bytes())
        ours = module.MCoreMetadata(**vars(metadata))
        ours.all_local_plans = [SavePlan(Stacked([torch.ones(2)], None, 1).__create_write_items__("x", None))]
        ours.mcore_data = {"x": {"nd_reformulated_orig_global_shape": (2, 3)}}
        (folder / ".metadata").write_bytes(pickle.dumps(ours))
        defaults = dict(
            rotary_interleaved=False, num_experts=None, params_dtype=torch.bfloat16, apply_layernorm_1p=False
        )
        state = argparse.Namespace(**{**defaults, "attention_backend": AttnBackend.auto, **arguments})
        torch.save({"args": state, "checkpoint_version": 3.0, "iteration": 7}, folder / "common.pt")
    finally:
        for name in modules:
            del sys.modules[name]
    (folder / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1}))
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("megatron")
    folders = {}
    for kind, positions in (("llama", "rope"), ("gpt", "learned_absolute")):
        arguments = dict(num_attention_heads=HEADS, position_embedding_type=positions)
        folders[kind] = write(root / kind, tensors_of(megatron(kind)), **arguments)
        (folders[kind] / "params.json").write_text(json.dumps({"vocab_size": VOCABULARY}))
    return folders


# -- our models ----------------------------------------------------------------------------------------------

SIZES = dict(
    num_layers=LAYERS, hidden_size=HIDDEN, num_heads=HEADS, head_dim=HEAD_DIM, seq_len=TOKENS, ffn_hidden_size=WIDE,
    vocab_size=VOCABULARY, norm_eps=1e-5,
)  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "llama": dict(type="Llama", num_kv_heads=2, rotary_base=10000.0, tie_embeddings=False, **SIZES),
    "gpt": dict(type="GPT", mlp="gelu", positions="learned", norm="layernorm", tie_embeddings=True, **SIZES),
}


@pytest.mark.parametrize("plan", but(PLANS.keys() - {"1d"}, PLANS))
@pytest.mark.parametrize("kind", MODELS)
def test_a_folder_of_megatron_trains_on(kind: str, plan: str, folders: dict[str, Path]) -> None:
    model = megatron(kind)
    logits = model(batch()["inputs"])
    loss = F.cross_entropy(logits.flatten(0, 1), batch()["labels"].flatten())
    loss.backward()
    last = model.decoder.layers[-1]
    groups = last.self_attention.groups
    by_group = last.self_attention.linear_qkv.weight.grad.unflatten(0, (groups, -1))
    queries = by_group[:, : HEADS // groups * HEAD_DIM].flatten(0, 1)
    values = by_group[:, -HEAD_DIM:].flatten(0, 1)
    world, parallel = PLANS[plan]
    for own_logits, own_loss, gradients in run_ranks(
        world, train_from, MODELS[kind], parallel, str(folders[kind]), with_context=False
    ):
        if own_logits is not None:
            assert (own_logits - logits).abs().max() < 1e-12
        assert abs(own_loss - loss.item()) < 1e-12
        block = "blocks.1.attention"
        for name, expected in {
            f"{block}.qkv.query.weight": queries,
            f"{block}.qkv.value.weight": values,
            f"{block}.out.weight": last.self_attention.linear_proj.weight.grad,
            "embedding.weight": model.embedding.word_embeddings.weight.grad[:VOCABULARY],
        }.items():
            assert (gradients[name] - expected).abs().max() < 1e-12, name


def test_layers_with_keys_of_their_own_in_a_section(folders: dict[str, Path], tmp_path: Path) -> None:
    """NeMo's section, layers by number, the halves of a gated MLP apart, no arguments: as other writers leave it."""
    state = tensors_of(megatron("llama"), is_stacked=False)
    for number in range(LAYERS):
        gate, value = state.pop(f"decoder.layers.{number}.mlp.linear_fc1.weight").chunk(2)
        state |= {f"decoder.layers.{number}.mlp.linear_fc1.weight_{half}": x for half, x in (("w", gate), ("v", value))}
    folder = write(tmp_path / "nemo", {f"module.{name}": value for name, value in state.items()})
    (folder / "common.pt").unlink()
    with pytest.raises(CheckpointError, match="nothing says how many heads there are"):
        read_state_dict(folder)
    (folder / "params.json").write_text(json.dumps({"n_heads": HEADS, "vocab_size": VOCABULARY}))
    state, expected = read_state_dict(folder), read_state_dict(folders["llama"])
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[name], expected[name]) for name in expected)


class Harmful:
    def __init__(self, function: Any) -> None:
        self.function = function

    def __reduce__(self) -> Any:
        return self.function, ("touch harmed",)


def test_no_code_of_the_arguments_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = write(tmp_path / "folder", tensors_of(megatron("llama")))
    torch.save({"args": Harmful(os.system)}, folder / "common.pt")
    with pytest.raises(
        CheckpointError, match=r"common.pt: cannot be read without running its code \(UnpicklingError\): say"
    ):
        read_state_dict(folder)
    torch.save({"args": Harmful(eval)}, folder / "common.pt")
    with pytest.raises(CheckpointError, match="nothing says how many heads there are"):
        read_state_dict(folder)
    (folder / "params.json").write_text(json.dumps({"n_heads": HEADS}))
    assert read_state_dict(folder)["embedding.weight"].shape == (PADDED, HIDDEN)
    assert not (tmp_path / "harmed").exists()


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "interleaved": ({}, dict(rotary_interleaved=True), r"no model for: rotary_interleaved = True \(not False\)"),
    "norms about one": ({}, dict(apply_layernorm_1p=True), r"apply_layernorm_1p = True \(not False\)"),
    "experts": (
        {"decoder.layers.mlp.router.weight": torch.ones(2, 3, 4)},
        {},
        "GPT has not: decoder.layers.mlp.router",
    ),
    "an encoder": ({"encoder.final_layernorm.weight": torch.ones(4)}, {}, "has not: encoder.final_layernorm.weight"),
    "heads": (
        {},
        dict(num_attention_heads=5),
        "n_heads = 5: decoder.layers.self_attention.linear_qkv.weight has 64 rows",
    ),
    "no projection": (
        {"decoder.layers.self_attention.linear_proj.weight": None},
        {},
        "linear_qkv.weight, and no decoder.layers.self_attention.linear_proj.weight",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_other_models_are_refused_in_words(case: str, tmp_path: Path) -> None:
    more, arguments, words = REFUSED[case]
    state = {name: value for name, value in {**tensors_of(megatron("llama")), **more}.items() if value is not None}
    folder = write(tmp_path / "folder", state, **{"num_attention_heads": HEADS, **arguments})
    with pytest.raises(CheckpointError, match=words):
        read_state_dict(folder)


def test_more_words_than_the_table_has_are_refused(tmp_path: Path) -> None:
    folder = write(tmp_path / "folder", tensors_of(megatron("llama")), num_attention_heads=HEADS)
    (folder / "params.json").write_text(json.dumps({"vocab_size": PADDED + 1}))
    with pytest.raises(CheckpointError, match=r"vocab_size = 41: embedding.word_embeddings.weight has 40 rows"):
        read_state_dict(folder)
