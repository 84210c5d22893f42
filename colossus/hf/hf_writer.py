"""The writer of Hugging Face's model folders. It plans from names and shapes, then streams one tensor at a time."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor

from colossus.arithmetic import listed
from colossus.checkpoint.durable import new_folder, require_new, write_flushed
from colossus.checkpoint.errors import CheckpointError
from colossus.checkpoint.part import Part
from colossus.checkpoint.rank_errors import on_all_ranks
from colossus.checkpoint.reader import CheckpointReader
from colossus.checkpoint.tensor_file import DTYPES, make_header, write_file
from colossus.checkpoint.weight_sources import GENERATION, TOKEN_IDS, Assets, read_assets, write_assets
from colossus.checkpoint.weights_only import MAX_SHARD_BYTES, require_finite, split_into_shards
from colossus.config.user_path import user_path
from colossus.hf.family import Family, Row, family_of
from colossus.hf.hf_folder import CONFIG, INDEX, SINGLE
from colossus.hf.lora_folder import LoRAFolder, merged, sources_of, without_adapters
from colossus.hf.native import native_config, native_rows
from colossus.hf.peft_folder import PeftFolder, has_adapters, plan_adapters
from colossus.models.options import kind_of
from colossus.registry import MODELS
from colossus.state.model_state_dict import stream_state_dict, whole_tensors
from colossus.state.replicas import common_weights


@dataclass(frozen=True)
class FolderPlan:
    """The content of a model folder that is to be written.

    Attributes:
        config: the content of ``config.json``.
        shards: file name -> the tensors in it, in their order.
        dtypes: the dtype of each tensor, by its name.
        assets: the files that go with the weights.
    """

    config: Mapping[str, Any]
    shards: Mapping[str, Sequence[Row]]
    dtypes: Mapping[str, torch.dtype]
    assets: Assets

    @property
    def part_names(self) -> list[str]:
        """Our parameters in the order in which they are written, so that each is gathered once."""
        names = (part.name for tensors in self.shards.values() for tensor in tensors for part in tensor.parts)
        return list(dict.fromkeys(names))

    def num_bytes(self, tensor: Row) -> int:
        return math.prod(tensor.shape) * self.dtypes[tensor.name].itemsize


def save(
    engine: Any,
    target: Path | str,
    *,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    merge: bool = False,
    on_tensor: Callable[[int], None] = lambda num_bytes: None,
) -> Path:
    """Write the model of an engine, under any plan, as a new model folder of Hugging Face.

        colossus.hf.save(engine, "models/mine")                       # on all ranks
        AutoModelForCausalLM.from_pretrained("models/mine")           # anywhere, later

    Collective: all ranks call, rank 0 writes. It holds one tensor of theirs and one parameter of ours at a time.

    A model with adapters, of peft or by ``model.lora``, is written as a folder of the adapters, which peft reads, or
    with ``merge`` as the whole model. Replicas with parameters of their own are averaged.

    Args:
        engine: an engine, or any object with a ``model`` under a plan and its ``context``.
        dtype: the dtype of the written weights; None: the dtype of the engine's.
        max_shard_bytes: the most bytes of one file, unless a single tensor is larger.
        merge: merge adapters into the weights that they adapt. Of those of peft rank 0 then holds all weights.
        on_tensor: called on rank 0 with the bytes of each tensor that is written.

    Returns:
        The folder.

    Raises:
        CheckpointError: on all ranks: no family fits the model, the folder exists, or it cannot be written.
    """
    target = user_path(target)
    with common_weights(engine):
        context, options = engine.context, getattr(engine.model, "options", None)
        world, our_tensors = context.group(context.grid.names), whole_tensors(engine.model, context)
        kind = kind_of(options) or type(engine.model).__name__
        is_writer, lora = context.is_logging_rank, getattr(options, "lora", None)
        assets, theirs = engine.checkpoints.assets, getattr(engine.model, "config", None)
        on_all_ranks(world, lambda: require_new(target) if is_writer else None, names_ranks=False)
        adapted: PeftFolder | LoRAFolder | None = None
        if has_adapters(engine.model):
            adapted, order = plan_adapters(engine.model, context, our_tensors, merge=merge, dtype=dtype)
        elif lora is not None and not merge:
            alone = LoRAFolder(kind, options, our_tensors, dtype)
            adapted, order = alone if is_writer else None, alone.names
        else:
            if options is None and hasattr(theirs, "to_dict"):  # a model of transformers' own code
                config = {**native_config(engine.model), "architectures": [type(engine.model).__name__]}
                plan = plan_native(config, our_tensors, dtype, max_shard_bytes, assets)
            else:
                plan = plan_folder(kind, options, without_adapters(our_tensors, lora), dtype, max_shard_bytes, assets)
            order = sources_of(plan.part_names, our_tensors, lora)
        parts = stream_state_dict(engine.model, context, order=order)

        def write() -> None:
            try:
                if adapted is not None:
                    adapted.write(target, parts, assets, max_shard_bytes, on_tensor)
                elif is_writer:
                    write_folder(target, plan, merged(parts, our_tensors, lora), on_tensor=on_tensor)
            finally:
                for _ in parts:  # all ranks finish the gathers, also where writing has failed
                    pass

        on_all_ranks(world, write, names_ranks=False)
    return target


def to_hf(
    reader: CheckpointReader,
    target: Path,
    *,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    on_tensor: Callable[[int], None] = lambda num_bytes: None,
) -> None:
    """Write the weights of a reader as a model folder, without ranks; see `save`.

    Raises:
        CheckpointError: no family of Hugging Face's fits the model, the target exists, or it cannot be written.
    """
    spec = dict(reader.manifest.config.get("model") or {})
    kind = str(spec.pop("type", "model that its checkpoint does not name"))
    try:
        declared = MODELS.options(kind)
        options = declared(**spec) if hasattr(declared, "check") else None
    except ValidationError as error:
        raise CheckpointError(f"{reader.folder}: its model cannot be understood: {error}") from None
    names = reader.manifest.names("model")
    entries = {name: reader.entry(f"model/{name}") for name in names}
    our_tensors = {
        name: Part.whole(name, torch.empty(entry.shape, dtype=DTYPES[entry.dtype], device="meta"))
        for name, entry in entries.items()
    }
    assets, lora = read_assets(reader.folder, reader.manifest.config), getattr(options, "lora", None)
    if kind == "hf":
        config = dict(spec["config"])
        if spec.get("architecture"):
            config["architectures"] = [spec["architecture"]]
        plan = plan_native(config, our_tensors, dtype, max_shard_bytes, assets)
    else:
        plan = plan_folder(kind, options, without_adapters(our_tensors, lora), dtype, max_shard_bytes, assets)
    parts = ((name, reader.tensor(f"model/{name}")) for name in sources_of(plan.part_names, our_tensors, lora))
    write_folder(target, plan, merged(parts, our_tensors, lora), on_tensor=on_tensor)


def plan_folder(
    kind: str,
    options: Any,
    our_tensors: Mapping[str, Part],
    dtype: torch.dtype | None,
    max_shard_bytes: int,
    assets: Assets,
) -> FolderPlan:
    """Return the folder that is written for a model of ours.

    Args:
        kind: the registered name of its type.
        our_tensors: its parameters and buffers by first name.

    Raises:
        CheckpointError: no family of Hugging Face's fits: the message names the options, or tensors, that differ.
    """
    family = family_of(kind, options)
    tensors = family.tensors(options)
    _require_same_names(family, tensors, our_tensors)
    config = {
        "model_type": family.model_type,
        "architectures": [family.architecture],
        **family.to_config(options),
        **family.extra_config(options, assets.config),
    }
    return _planned(tensors, config, our_tensors, dtype, max_shard_bytes, assets)


def plan_native(
    config: Mapping[str, Any],
    our_tensors: Mapping[str, Part],
    dtype: torch.dtype | None,
    max_shard_bytes: int,
    assets: Assets,
) -> FolderPlan:
    """Return the folder that is written for a model of transformers' own code; its parameters have the folder's names.

    Args:
        config: the content of ``config.json``.
    """
    tensors = native_rows(config, {name: tensor.shape for name, tensor in our_tensors.items()})
    return _planned(tensors, dict(config), our_tensors, dtype, max_shard_bytes, assets)


def _planned(
    tensors: Sequence[Row],
    config: dict[str, Any],
    our_tensors: Mapping[str, Part],
    dtype: torch.dtype | None,
    max_shard_bytes: int,
    assets: Assets,
) -> FolderPlan:
    dtypes = {tensor.name: dtype or our_tensors[tensor.parts[0].name].dtype for tensor in tensors}
    shards = split_into_shards(
        tensors, lambda tensor: math.prod(tensor.shape) * dtypes[tensor.name].itemsize, max_shard_bytes
    )
    files = [f"model-{n + 1:05d}-of-{len(shards):05d}.safetensors" for n in range(len(shards))]
    widest = str(max(dtypes.values(), key=lambda dtype: dtype.itemsize)).removeprefix("torch.")
    config |= {"dtype": widest, "torch_dtype": widest}  # the key is torch_dtype before transformers 5
    by_file = dict(zip(files if len(files) > 1 else [SINGLE], shards, strict=True))
    return FolderPlan(config, by_file, dtypes, assets)


def _require_same_names(family: Family, tensors: Sequence[Row], our_tensors: Mapping[str, Part]) -> None:
    wanted = {part.name: part.shape for tensor in tensors for part in tensor.parts}
    here = {name: tensor.shape for name, tensor in our_tensors.items()}
    for title, names in (
        ("it has no", wanted.keys() - here.keys()),
        (f"a {family.model_type} has no", here.keys() - wanted.keys()),
        (
            "of another shape than its options say is",
            {name for name, shape in wanted.items() if here.get(name) != shape},
        ),
    ):
        if names:
            raise CheckpointError(
                f"the model cannot be written for Hugging Face: {title} {listed(sorted(names))}. "
                f"Merge or remove adapters and other modules of your own first"
            )


def write_folder(
    target: Path,
    plan: FolderPlan,
    parts: Iterable[tuple[str, Tensor]],
    *,
    on_tensor: Callable[[int], None] = lambda num_bytes: None,
) -> None:
    """Write a planned folder; it gets its name when it is complete.

    Args:
        parts: our parameters with their names, in the order of ``plan.part_names``.

    Raises:
        CheckpointError: the folder exists, or cannot be written.
    """
    stream = _ParameterStream(parts)
    with new_folder(target) as folder:
        weight_map: dict[str, str] = {}
        for file, tensors in plan.shards.items():
            header = make_header([(tensor.name, plan.dtypes[tensor.name], tensor.shape) for tensor in tensors])
            write_file(folder / file, header, _assembled(tensors, plan, stream, on_tensor))
            weight_map |= {tensor.name: file for tensor in tensors}
        if len(plan.shards) > 1:
            total = sum(plan.num_bytes(tensor) for tensors in plan.shards.values() for tensor in tensors)
            _write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
        _write_json(folder / CONFIG, plan.config)
        write_assets(plan.assets.files, folder)
        token_ids = plan.assets.config.get(TOKEN_IDS)
        if token_ids and GENERATION not in plan.assets.files:
            _write_json(folder / GENERATION, {"_from_model_config": True, **token_ids})


class _ParameterStream:
    """A stream of our parameters whose last one can be taken several times."""

    def __init__(self, parts: Iterable[tuple[str, Tensor]]) -> None:
        self._parts = iter(parts)
        self._last: tuple[str, Tensor] | None = None

    def take(self, name: str) -> Tensor:
        if self._last is None or self._last[0] != name:
            self._last = None  # frees its memory before the next parameter is gathered
            self._last = next(self._parts)
        assert self._last[0] == name
        return self._last[1]


def _assembled(
    tensors: Sequence[Row],
    plan: FolderPlan,
    stream: _ParameterStream,
    on_tensor: Callable[[int], None],
) -> Iterator[Tensor]:
    for tensor in tensors:
        whole = torch.empty(tensor.rows, dtype=plan.dtypes[tensor.name])
        for part, first in tensor.located():
            stacked = tensor.of_part(whole, part)
            value = stream.take(part.name)
            value = value if tensor.index is None else value[tensor.index : tensor.index + 1]
            rows = stacked[max(0, first) : first + part.shape[0]].copy_(value)
            require_finite(rows, f"{tensor.name} ({part.name})", value)
            del value
        yield whole.view(tensor.shape)
        del whole, stacked
        on_tensor(plan.num_bytes(tensor))


def _write_json(path: Path, body: Mapping[str, Any]) -> None:
    write_flushed(path, (json.dumps(body, indent=2) + "\n").encode())
