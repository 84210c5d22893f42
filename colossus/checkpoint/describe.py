"""What is in a checkpoint, as text and as plain data. From the manifest alone; no torch."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from colossus.arithmetic import byte_count
from colossus.checkpoint.manifest import Manifest, TensorEntry
from colossus.checkpoint.natural_order import natural_order

#: of the tree; parts of a name below are one
_MOST_LEVELS = 64
#: checkpoints that are listed
_MOST_STEPS = 12
#: sections that have lines of their own
_IN_HEAD = {"model", "optimizer", "replicas"}
#: column; what is longer moves what follows it
_WIDEST = 72
#: (name with its indentation, shape, dtype, numbers, bytes)
Row = tuple[str, str, str, str, str]


def describe(folder: Path, manifest: Manifest, *, everything: bool = False, steps: Sequence[int] = ()) -> str:
    """A head, and the tree of the model's modules; modules of a list that are alike are one.

    Args:
        steps: of the checkpoints among which this one was chosen.
        everything: no summary: every tensor of the checkpoint, and which rank's file has which box of it.
    """
    parts = [_head(folder, manifest, steps)]
    sections = dict(_sections(manifest))
    if everything:
        for section, tensors in sections.items():
            parts.append(_tree(section, tensors, manifest.aliases if section == "model" else {}, alike=False))
        parts.append(_chunks(manifest))
    elif sections.get("model"):
        parts.append(_tree("model", sections["model"], manifest.aliases, alike=True))
    return printable("\n\n".join(parts))


def as_data(folder: Path, manifest: Manifest, *, everything: bool = False) -> dict[str, Any]:
    """The same as JSON-able data; ``everything`` adds the chunks of each tensor."""
    return {
        "path": str(folder),
        "step": manifest.step,
        "saved_at": manifest.saved_at,
        "versions": dict(manifest.versions),
        "plan": dict(manifest.plan),
        "config": dict(manifest.config),
        "tokenizer": manifest.tokenizer,
        "num_bytes": manifest.num_bytes,
        "num_parameters": _numbers(dict(_sections(manifest)).get("model", {}).values()),
        "files": {
            name: {"num_bytes": file.num_bytes, "crc32": f"{file.crc32:08x}"} for name, file in manifest.files.items()
        },
        "tensors": {
            key: {"dtype": entry.dtype, "shape": list(entry.shape), "num_bytes": entry.num_bytes}
            | ({"chunks": [_chunk_data(entry, number) for number in range(len(entry.chunks))]} if everything else {})
            for key, entry in sorted(manifest.tensors.items(), key=lambda item: natural_order(item[0]))
        },
        "aliases": dict(manifest.aliases),
        "values": sorted(manifest.values),
    }


def printable(text: str) -> str:
    """Without characters that a terminal obeys: names come from the file."""
    return "".join(each if each.isprintable() or each == "\n" else ascii(each)[1:-1] for each in text)


def _sections(manifest: Manifest) -> Iterator[tuple[str, dict[str, TensorEntry]]]:
    """Tensors by the first part of their keys, the model first; within, in natural order."""
    found: dict[str, dict[str, TensorEntry]] = {"model": {}, "optimizer": {}}
    for key, entry in sorted(manifest.tensors.items(), key=lambda item: natural_order(item[0])):
        section, _, name = key.partition("/")
        found.setdefault(section, {})[name] = entry
    yield from ((section, tensors) for section, tensors in found.items() if tensors)


def _numbers(entries: Iterable[TensorEntry]) -> int:
    return sum(prod(entry.shape) for entry in entries)


def _bytes(entries: Iterable[TensorEntry]) -> int:
    return sum(entry.num_bytes for entry in entries)


# -- the head ---------------------------------------------------------------------------------------------


def _head(folder: Path, manifest: Manifest, steps: Sequence[int]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in manifest.versions.items())
    saved = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(manifest.saved_at))
    ranks = manifest.plan.get("num_ranks")
    lines = [("step", f"{manifest.step:,}"), ("saved", f"{saved} by {versions}" if versions else saved)]
    plan = str(manifest.plan.get("text", "not known"))
    lines.append(("plan", plan + (f" ({ranks} rank{'s' * (ranks != 1)})" if isinstance(ranks, int) else "")))
    for section, tensors in _sections(manifest):
        if section in ("model", "optimizer"):
            lines.append((section, _summary(section, tensors, manifest)))
        elif section == "replicas":
            lines.append((section, _summary_of_replicas(tensors)))
    if manifest.tokenizer is not None:
        lines.append(("tokenizer", manifest.tokenizer))
    beside = _beside(manifest)
    if beside:
        lines.append(("beside", beside))
    count = len(manifest.files)
    lines.append(("files", f"{count} file{'s' * (count != 1)}, {byte_count(manifest.num_bytes)}"))
    if len(steps) > 1:
        listed = [f"{step:,}" for step in sorted(steps)]
        most = ["..", *listed[-_MOST_STEPS:]] if len(listed) > _MOST_STEPS else listed
        lines.append(("chosen", f"of the {len(steps)} checkpoints in {folder.parent}: steps {', '.join(most)}"))
    return "\n".join([str(folder), *(f"{title:<11} {text}" for title, text in lines)])


def _summary(section: str, tensors: Mapping[str, TensorEntry], manifest: Manifest) -> str:
    size = f"{_numbers(tensors.values()):,} numbers, {byte_count(_bytes(tensors.values()))}"
    dtypes = Counter(entry.dtype for entry in tensors.values())
    kinds = ", ".join(f"{dtype}" if len(dtypes) == 1 else f"{count} {dtype}" for dtype, count in dtypes.most_common())
    text = f"{size} in {len(tensors)} tensors ({kinds})"
    if section == "model":
        tied = len(manifest.aliases)
        return text + (f", {tied} more name{'s' * (tied != 1)} of tied ones" if tied else "")
    entries = sorted({name.rpartition("/")[2] for name in tensors})
    name = manifest.config.get("optimizer", {})
    name = name.get("type") if isinstance(name, Mapping) else None
    return (f"{name}: " if isinstance(name, str) else "") + text + f": {', '.join(entries)}"


def _summary_of_replicas(tensors: Mapping[str, TensorEntry]) -> str:
    """Of what each has of its own: how many there are, what, and the bytes of all."""
    numbers, kinds = {name.split("/")[0] for name in tensors}, {name.split("/")[1] for name in tensors}
    what = ", ".join(kind for kind in ("model", "optimizer", "strategy") if kind in kinds)
    return f"{len(numbers)}, each with its own {what}: {byte_count(_bytes(tensors.values()))}"


def _beside(manifest: Manifest) -> str:
    """State that is neither of the model nor of the optimizer's parameters: what there is, and its bytes."""
    sections = {section: tensors for section, tensors in _sections(manifest) if section not in _IN_HEAD}
    kinds = {path.partition("/")[0] for path in manifest.values} | sections.keys()
    names = sorted(kinds - _IN_HEAD)
    size = sum(_bytes(tensors.values()) for tensors in sections.values())
    return ", ".join(names) + (f", {byte_count(size)} of tensors" if size else "")


# -- the tree ---------------------------------------------------------------------------------------------


@dataclass
class _Node:
    entry: TensorEntry | None = None
    note: str = ""
    children: dict[str, _Node] = field(default_factory=dict)

    def leaves(self) -> Iterator[TensorEntry]:
        if self.entry is not None:
            yield self.entry
        for child in self.children.values():
            yield from child.leaves()

    def likeness(self) -> Any:
        """The same for nodes with the same tensors below them."""
        own = (self.entry.dtype, self.entry.shape) if self.entry is not None else None
        return own, self.note, tuple((name, child.likeness()) for name, child in self.children.items())


def _tree(section: str, tensors: Mapping[str, TensorEntry], aliases: Mapping[str, str], *, alike: bool) -> str:
    root = _Node()
    for name, entry in tensors.items():
        _place(root, name).entry = entry
    for alias, name in aliases.items():
        _place(root, alias).note = f"is {name}"
    rows: list[Row] = [(section, "shape", "dtype", "numbers", "bytes")]
    rows += _rows(root, 1, alike=alike)
    widths = [min(max(len(row[column]) for row in rows), _WIDEST) for column in range(5)]
    return "\n".join(
        f"{row[0]:<{widths[0]}}  {row[1]:<{widths[1]}}  {row[2]:<{widths[2]}}  {row[3]:>{widths[3]}}  "
        f"{row[4]:>{widths[4]}}".rstrip()
        for row in rows
    )


def _place(root: _Node, name: str) -> _Node:
    node = root
    for part in name.replace("/", ".").split(".", _MOST_LEVELS):
        node = node.children.setdefault(part, _Node())
    return node


def _rows(node: _Node, depth: int, *, alike: bool) -> Iterator[Row]:
    for names, child in _grouped(node.children) if alike else (([name], each) for name, each in node.children.items()):
        label = names[0]
        while len(child.children) == 1 and child.entry is None and not child.note:  # norm.weight in one line
            ((below, child),) = child.children.items()
            label += f".{below}"
        if len(names) > 1:
            first, _, rest = label.partition(".")
            label = f"{first} .. {names[-1]}" + (f".{rest}" if rest else "")
        times = len(names)
        indented = "  " * depth + label
        leaves = list(child.leaves())
        numbers, size = f"{times * _numbers(leaves):,}", byte_count(times * _bytes(leaves))
        if child.entry is not None:
            shape = " x ".join(map(str, child.entry.shape)) or "scalar"
            yield indented, shape, child.entry.dtype, numbers, size
        elif child.note:
            yield indented, child.note, "", "", ""
        else:
            yield indented, f"{times} alike, one of them:" if times > 1 else "", "", numbers, size
        yield from _rows(child, depth + 1, alike=alike)


def _grouped(children: Mapping[str, _Node]) -> Iterator[tuple[Sequence[str], _Node]]:
    """Numbered children one after the other that have the same below them, together."""
    names: list[str] = []
    likeness: Any = None
    for name, child in children.items():
        mine = child.likeness() if name.isdecimal() else None
        if names and mine is not None and mine == likeness and int(name) == int(names[-1]) + 1:
            names.append(name)
            continue
        if names:
            yield names, children[names[0]]
        names, likeness = [name], mine
    if names:
        yield names, children[names[0]]


# -- who has what -----------------------------------------------------------------------------------------


def _chunk_data(entry: TensorEntry, number: int) -> dict[str, Any]:
    chunk = entry.chunks[number]
    return {"file": chunk.file, "offset": chunk.offset, "start": list(chunk.start), "size": list(chunk.size)}


def _chunks(manifest: Manifest) -> str:
    lines = ["boxes"]
    for key, entry in sorted(manifest.tensors.items(), key=lambda item: natural_order(item[0])):
        lines.append(f"  {key}")
        for chunk in entry.chunks:
            spans = (f"{start}:{start + size}" for start, size in zip(chunk.start, chunk.size, strict=True))
            lines.append(f"    [{', '.join(spans)}] in {chunk.file} at byte {chunk.offset:,}")
    return "\n".join(lines)
