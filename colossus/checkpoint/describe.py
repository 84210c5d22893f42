"""The content of a checkpoint as text, from the manifest alone. No torch."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from math import prod
from pathlib import Path

from colossus.arithmetic import aligned, byte_count
from colossus.checkpoint.manifest import Manifest, TensorEntry
from colossus.checkpoint.matching import natural_order
from colossus.checkpoint.saved_averages import averages_in

#: largest width of a column
_WIDEST = 72


def describe(folder: Path, manifest: Manifest, *, everything: bool = False) -> str:
    """Return a head and a table of the model's parameters and buffers; those that layers have alike share a row.

    Args:
        folder: folder of the checkpoint.
        manifest: its manifest.
        everything: whether every tensor of the checkpoint has a row.
    """
    parts = [_head(folder, manifest)]
    for section, tensors in _sections(manifest).items():
        if everything or section == "model":
            parts.append(_table(section, tensors, manifest.aliases if section == "model" else {}, alike=not everything))
    return printable("\n\n".join(parts))


def printable(text: str) -> str:
    """Return a text with control characters escaped, which a terminal would obey: names come from the file."""
    return "".join(char if char.isprintable() or char == "\n" else ascii(char)[1:-1] for char in text)


def _sections(manifest: Manifest) -> dict[str, dict[str, TensorEntry]]:
    """Return tensors by the first part of their keys, the model first; in each, in natural order."""
    sections: dict[str, dict[str, TensorEntry]] = {"model": {}, "optimizer": {}}
    for key, entry in sorted(manifest.tensors.items(), key=lambda item: natural_order(item[0])):
        section, _, name = key.partition("/")
        sections.setdefault(section, {})[name] = entry
    return {section: tensors for section, tensors in sections.items() if tensors}


def _size(entries: Iterable[TensorEntry]) -> str:
    """Return numbers and bytes of some tensors: ``16,056 numbers, 128 KB``."""
    entries = list(entries)
    numbers, size = sum(prod(entry.shape) for entry in entries), sum(entry.num_bytes for entry in entries)
    return f"{numbers:,} numbers, {byte_count(size)}"


def _head(folder: Path, manifest: Manifest) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in manifest.versions.items())
    saved = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(manifest.saved_at))
    lines = {
        "step": f"{manifest.step:,}",
        "saved": f"{saved} by {versions}",
        "plan": str(manifest.plan.get("text", "not known")),
    }
    for section, tensors in _sections(manifest).items():
        dtypes = Counter(entry.dtype for entry in tensors.values())
        lines[section] = f"{_size(tensors.values())} in {len(tensors)} tensors ({', '.join(dtypes)})"
    if averages := averages_in(manifest):
        lines["averages"] = f"{', '.join(averages)} (--weights of evaluate, generate and checkpoint convert)"
    if manifest.tokenizer is not None:
        lines["tokenizer"] = manifest.tokenizer
    if manifest.values:
        lines["state"] = ", ".join(sorted({path.partition("/")[0] for path in manifest.values}))
    lines["files"] = f"{len(manifest.files)}, {byte_count(manifest.num_bytes)}"
    return "\n".join([str(folder), *(f"{title:<11} {text}" for title, text in lines.items())])


def _table(section: str, tensors: Mapping[str, TensorEntry], aliases: Mapping[str, str], *, alike: bool) -> str:
    """Return rows of tensors. Tensors whose names differ in numbers alone share one (``blocks.*.norm``)."""
    groups: dict[tuple[str, tuple[int, ...], str], list[TensorEntry]] = {}
    for name, entry in tensors.items():
        name = re.sub(r"(?<![^.])\d+(?![^.])", "*", name) if alike else name
        groups.setdefault((name, entry.shape, entry.dtype), []).append(entry)
    rows = [(section, "tensors", "shape", "dtype", "numbers", "bytes")]
    for (name, shape, dtype), entries in groups.items():
        numbers, size = _size(entries).split(" numbers, ")
        rows.append((f"  {name}", str(len(entries)), " x ".join(map(str, shape)) or "scalar", dtype, numbers, size))
    rows += [(f"  {alias}", "", f"is {name}", "", "", "") for alias, name in aliases.items()]
    return aligned(rows, left_columns=(0, 2, 3), widest=_WIDEST)
