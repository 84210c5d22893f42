"""Adapters of ``model.lora`` as folders of peft, in and out, and the weights of a model with its adapters merged.

Neither peft nor transformers is needed. A tensor of theirs that is several parameters of ours (GPT-2's ``c_attn``) has
one adapter there: its matrices are those of ours in blocks, its rank and alpha as many times as large.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from colossus.arithmetic import listed
from colossus.checkpoint.adapter_names import AdaptedWeight, adapted_weights, adapter_names, plain_names
from colossus.checkpoint.durable import flush, new_folder
from colossus.checkpoint.errors import CheckpointError
from colossus.checkpoint.manifest import Manifest, TensorEntry
from colossus.checkpoint.reader import CheckpointReader
from colossus.checkpoint.tensor_file import dtype_name
from colossus.checkpoint.weight_sources import Assets, write_assets
from colossus.checkpoint.weights_only import require_finite
from colossus.config.user_path import user_path
from colossus.context.groups import AxisGroup
from colossus.hf.family import Family, Part, Row, family_of
from colossus.hf.hf_folder import read_json
from colossus.layout.layout import Box

T = TypeVar("T")

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
#: keys of a peft config that must have these values, or be absent
_REQUIRED: Mapping[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",), "bias": ("none", None), "use_dora": (False, None), "use_rslora": (False, None),
    "lora_bias": (False, None), "modules_to_save": (None, []), "layers_to_transform": (None,),
}  # fmt: skip


# -- merged -----------------------------------------------------------------------------------------------


def without_adapters(tensors: Mapping[str, T], lora: Any) -> Mapping[str, T]:
    """Return the parameters and buffers that a model has without its adapters, by their names there.

    Args:
        tensors: those of the model.
        lora: its option; without it they stay as they are.
    """
    if lora is None:
        return tensors
    own, plain = adapter_names(tensors), {name: mine for mine, name in plain_names(tensors).items()}
    return {plain.get(name, name): tensor for name, tensor in tensors.items() if name not in own}


def sources_of(names: Sequence[str], own: Collection[str], lora: Any) -> list[str]:
    """Return the parameters of a model with adapters that make up those of one without, in their order.

    Args:
        names: names without adapters.
        own: names of the model's own parameters.
        lora: its option; without it they are the same.
    """
    adapted, plain = ({}, {}) if lora is None else (adapted_weights(own), plain_names(own))
    return [source for name in names for source in adapted.get(name, (plain.get(name, name),))]


def merged(parts: Iterable[tuple[str, Tensor]], own: Collection[str], lora: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters of a model with its adapters merged, from those that `sources_of` names.

    Args:
        parts: names and values; none on a rank that does not write.
        own: names of the model's own parameters.
        lora: its option; without it nothing is merged.
    """
    if lora is None:
        yield from parts
        return
    plain, last = {name: mine for mine, name in plain_names(own).items()}, dict[str, Tensor]()
    by_second = {names.second: (name, names) for name, names in adapted_weights(own).items()}
    is_source = {name for _, names in by_second.values() for name in names}
    for name, value in parts:
        if name not in is_source:
            yield plain.get(name, name), value
            continue
        last[name] = value
        if name in by_second:
            merged_name, names = by_second[name]
            base, first, second = (last[key] for key in names)
            yield merged_name, _merged(base, first, second, lora.scale)
            last.clear()


def _merged(base: Tensor, first: Tensor, second: Tensor, scale: float) -> Tensor:
    wide = torch.promote_types(base.dtype, torch.float32)
    return (base.to(wide) + scale * (second.to(wide) @ first.to(wide))).to(base.dtype)


# -- alone ------------------------------------------------------------------------------------------------


class LoRAFolder:
    """A folder of peft with the adapters of a model.

    Args:
        kind: registered name of the model's type.
        options: its options.
        own: names of its parameters.
        dtype: dtype of the written tensors; None: each tensor's own.

    Attributes:
        names: our parameters that are written.

    Raises:
        CheckpointError: no family of Hugging Face's fits the model, or one of its tensors has no place for an adapter.
    """

    def __init__(self, kind: str, options: Any, own: Collection[str], dtype: torch.dtype | None) -> None:
        self._options, self._dtype = options, dtype
        self._rows = adapted_rows(family_of(kind, options), options, own)
        self.names = list(dict.fromkeys(name for _, parts in self._rows for _, names in parts for name in names[1:]))

    def write(
        self, target: Path, parts: Iterable[tuple[str, Tensor]], assets: Assets, max_shard_bytes: int,
        on_tensor: Callable[[int], None],
    ) -> None:  # fmt: skip
        """Write the folder, as `PeftFolder.write` does, in one file."""
        values = {}
        for name, value in parts:
            values[name] = value.detach().to("cpu", self._dtype)
            require_finite(values[name], name, value)
            on_tensor(value.numel() * value.element_size())
        lora, tensors, ranks = self._options.lora, dict[str, Tensor](), dict[str, int]()
        for row, adapted in self._rows:
            first = torch.cat([values[names.first] for _, names in adapted])
            second = torch.zeros(sum(part.shape[0] for part in row.parts), len(first), dtype=first.dtype)
            for number, (rows, names) in enumerate(adapted):
                second[rows, number * lora.rank : (number + 1) * lora.rank] = values[names.second]
            module = row.name.removesuffix(".weight")
            tensors[f"{_PREFIX}{module}.lora_A.weight"] = first.contiguous()
            tensors[f"{_PREFIX}{module}.lora_B.weight"] = second
            ranks[_suffix(module)] = len(first)
        larger = {module: rank for module, rank in ranks.items() if rank != lora.rank}
        config = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": None,
            "r": lora.rank,
            "lora_alpha": lora.alpha,
            "target_modules": list(ranks),
            "rank_pattern": larger,
            "alpha_pattern": {module: lora.scale * rank for module, rank in larger.items()},
            "fan_in_fan_out": any(row.transposed for row, _ in self._rows),
            "lora_dropout": 0.0,
            "bias": "none",
            "inference_mode": True,
        }
        with new_folder(target) as folder:
            (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
            save_file(tensors, folder / WEIGHTS, {"format": "pt"})
            write_assets(assets.files, folder)
            for path in folder.iterdir():
                flush(path)


def adapted_rows(
    family: Family, options: Any, own: Collection[str]
) -> list[tuple[Row, list[tuple[slice, AdaptedWeight]]]]:
    """Return the tensors of a folder that have adapters, each with the rows and names of those of ours."""
    adapted, rows = adapted_weights(own), []
    for row in family.tensors(options):
        if not any(part.name in adapted for part in row.parts):
            continue
        if row.interleaved or row.index is not None:
            raise CheckpointError(f"{row.name}: is several parameters of ours in turn, which peft has no adapter for")
        rows.append((row, [(_rows_of(row, part), adapted[part.name]) for part in row.parts if part.name in adapted]))
    return rows


def _rows_of(row: Row, part: Part) -> slice:
    first = next(first for other, first in row.located() if other is part)
    return slice(first, first + part.shape[0])


def _suffix(module: str) -> str:
    """Return the last two parts of a name, which name the same linear in all layers and none beside."""
    return ".".join(module.split(".")[-2:])


class LoRAReader(CheckpointReader):
    """The adapters in a folder of peft, by the names that they have in a model of ours.

    Args:
        folder: the folder.
        kind: registered name of the model's type.
        options: its options.
        own: names of its parameters.

    Raises:
        CheckpointError: the folder cannot be read, or has other adapters than the model.
    """

    def __init__(self, folder: Path | str, kind: str, options: Any, own: Collection[str]) -> None:
        self.folder = user_path(folder)
        self._descriptors: dict[str, int] = {}
        config = read_json(self.folder / CONFIG)
        self._require_config(config, options)
        try:
            stored = load_file(self.folder / WEIGHTS)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{self.folder / WEIGHTS}: cannot be read: {error}") from None
        self._values: dict[str, Tensor] = {}
        for row, adapted in adapted_rows(family_of(kind, options), options, own):
            module = row.name.removesuffix(".weight")
            pair = [stored.pop(f"{_PREFIX}{module}.lora_{side}.weight", None) for side in "AB"]
            if pair[0] is None or pair[1] is None:
                raise CheckpointError(f"{self.folder}: has no adapter of {module}: set model.lora.targets to its own")
            self._take(module, pair[0], pair[1], adapted, options.lora)
        if stored:
            raise CheckpointError(
                f"{self.folder}: has adapters that model.lora.targets does not name: {listed(sorted(stored))}"
            )
        tensors = {
            key: TensorEntry(dtype_name(value.dtype), tuple(value.shape), ()) for key, value in self._values.items()
        }
        text = {"text": "a folder of peft"}
        self.manifest = Manifest(0, time.time(), {}, text, {}, {}, tensors)

    def _require_config(self, config: Mapping[str, Any], options: Any) -> None:
        lora = options.lora
        for key, allowed in _REQUIRED.items():
            if config.get(key) not in allowed:
                raise CheckpointError(f"{self.folder / CONFIG}: {key} = {config[key]!r}: colossus has LoRA alone")
        if config.get("r") != lora.rank or config.get("lora_alpha") != lora.alpha:
            raise CheckpointError(
                f"{self.folder / CONFIG}: r = {config.get('r')}, lora_alpha = {config.get('lora_alpha')}, but "
                f"model.lora has rank = {lora.rank}, alpha = {lora.alpha:g}: set those of the folder"
            )

    def _take(
        self, module: str, first: Tensor, second: Tensor, adapted: list[tuple[slice, AdaptedWeight]], lora: Any
    ) -> None:
        """Take the matrices of one tensor of theirs: one pair for all rows, or one in blocks for each part of ours."""
        rank, count = lora.rank, len(adapted)
        is_in_blocks = len(first) == rank * count and count > 1
        if len(first) != rank and not is_in_blocks:
            raise CheckpointError(f"{self.folder}: the adapter of {module} has rank {len(first)}, model.lora {rank}")
        uncovered = second.clone()
        for number, (rows, names) in enumerate(adapted):
            columns = slice(number * rank, (number + 1) * rank) if is_in_blocks else slice(None)
            self._values[f"model/{names.first}"] = first[columns].contiguous()
            self._values[f"model/{names.second}"] = second[rows, columns].contiguous()
            uncovered[rows, columns] = 0
        if uncovered.any():
            raise CheckpointError(
                f"{self.folder}: the adapter of {module} also changes rows that model.lora.targets does not name"
            )

    def read_box(self, key: str, box: Box, out: Tensor) -> None:
        """Fill ``out`` with a box of a parameter."""
        self.entry(key)
        out.copy_(self._values[key][tuple(slice(start, stop) for start, stop in box)])

    def verify(self, group: AxisGroup | None = None, on_block: Callable[[], None] = lambda: None) -> None:
        """Check nothing: folders of peft have no checksums."""
