"""Text as bytes (vocabulary of 256), or as ids of a tokenizer: Python's own standard library, and a folder of files.

A hash of its relative path decides whether a file is held out for validation. So a file stays in its split when others
come and go, and from one Python version to the next.
"""

from __future__ import annotations

import hashlib
import os
import platform
import sysconfig
from pathlib import Path
from typing import NamedTuple

import numpy as np

from colossus.checkpoint.manifest import BYTES
from colossus.config.user_path import user_path
from colossus.data.tokenizer import dataset_tokenizer
from colossus.data.tokens import TokenWindows, check_split

STDLIB_FRACTION = 0.05
# tests, and files of other packages or of the build of this Python, which differ between machines of one version
_LEFT_OUT_FOLDERS = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
_LEFT_OUT_PREFIXES = ("_sysconfigdata", "sitecustomize", "usercustomize", "config-")


class TextFile(NamedTuple):
    name: str  # relative to the root, with "/" on every system
    path: Path
    size: int  # bytes to take


class _TextWindows(TokenWindows):
    """One split of a list of files.

    Attributes:
        tokenizer: tokenizer of the text.
        sha256: SHA-256 of the text.
        held_out: whether "files" are held out for validation, or the "tail" of all.
        file_names: files of the split.
    """

    def __init__(
        self,
        files: list[TextFile],
        seq_len: int,
        split: str,
        fraction: float,
        name: str,
        tokenizer: str | os.PathLike[str] | None,
    ) -> None:
        check_split(split, fraction, name)
        self.tokenizer = dataset_tokenizer(BYTES if tokenizer is None else tokenizer, name)
        chosen, texts, held_out = texts_of_split(files, fraction, split)
        text = b"".join(texts)
        if self.tokenizer.name == BYTES:
            ids, vocab_size = np.frombuffer(text, dtype=np.uint8), 256
        else:
            ids = self.tokenizer.encode(texts, name)
            vocab_size = int(ids.max()) + 1 if len(ids) else 0
        super().__init__(ids, seq_len, name=f"{name} ({split})", vocab_size=vocab_size)
        self.sha256, self.held_out = hashlib.sha256(text).hexdigest(), held_out
        self.file_names = [file.name for file in chosen]

    def describe(self) -> str:
        how = f", tokenizer {self.tokenizer.path} ({self.tokenizer.sha256[:12]})" if self.tokenizer.path else ""
        return f"{super().describe()}, {len(self.file_names)} files, sha256 {self.sha256[:12]}{how}"


class PythonStdlib(_TextWindows):
    """The source of the running Python's standard library: real text on every machine, nothing to download.

    It is the first ``max_bytes`` of all ``.py`` files sorted by relative path, without tests and installed packages;
    about 5 % of the files are held out for validation. The text differs between Python versions: the log has its
    SHA-256.

    Args:
        seq_len: tokens of a sample: bytes, unless there is a tokenizer.
        split: ``"train"`` or ``"validation"``.
        max_bytes: bytes of both splits together.
        tokenizer: a ``tokenizer.json`` of Hugging Face, or a folder with one (`colossus.data.tokenizer`). Each file is
            encoded by itself, as are both parts of a file whose tail is held out. None is bytes, or the tokenizer of
            the folder in ``model = dict(type="hf", path=...)``.

    Raises:
        ValueError: if this Python has no readable sources.
        TooLittleData: if ``max_bytes`` is too small for a sample.
    """

    def __init__(
        self,
        seq_len: int,
        split: str = "train",
        max_bytes: int = 8_000_000,
        tokenizer: str | os.PathLike[str] | None = None,
    ) -> None:
        files = stdlib_files(max_bytes, "PythonStdlib")
        super().__init__(files, seq_len, split, STDLIB_FRACTION, "PythonStdlib", tokenizer)

    def describe(self) -> str:
        return f"{super().describe()}, Python {platform.python_version()}"


class TextFolder(_TextWindows):
    """All files of a folder that match a pattern, in the order of their relative paths.

    About ``validation_fraction`` of the bytes is held out, as whole files. If these would be less than a third or more
    than three times as much (one file, or a few of unlike size), the tail of the whole text is held out instead.

    Args:
        path: the folder; ``~`` is expanded.
        seq_len: tokens of a sample: bytes, unless there is a tokenizer.
        pattern: pattern of file names, as in `pathlib.Path.glob`.
        split: ``"train"`` or ``"validation"``.
        validation_fraction: fraction of the bytes that is held out; 0 holds nothing out.
        tokenizer: see `PythonStdlib`.

    Raises:
        ValueError: if there is no such folder, or no file that matches.
        TooLittleData: if the text of this split is too short for one sample.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        seq_len: int,
        pattern: str = "**/*.txt",
        split: str = "train",
        validation_fraction: float = 0.05,
        tokenizer: str | os.PathLike[str] | None = None,
    ) -> None:
        root = user_path(path)
        if not root.is_dir():
            what = "is a file, not a folder" if root.exists() else "does not exist"
            raise ValueError(f"TextFolder: {str(path)!r} {what} (looked from {os.getcwd()}); set data.path to a folder")
        matched = [(file.relative_to(root).as_posix(), file) for file in root.glob(pattern) if file.is_file()]
        if not matched:
            raise ValueError(
                f"TextFolder: no file in {str(path)!r} matches {pattern!r}; set data.pattern (for example '**/*.md')"
            )
        files = [TextFile(name, file, file.stat().st_size) for name, file in sorted(matched)]
        super().__init__(files, seq_len, split, validation_fraction, f"TextFolder {str(path)!r}", tokenizer)


def stdlib_files(max_bytes: int, name: str) -> list[TextFile]:
    """Return the files with the first ``max_bytes`` of the source of the standard library.

    Args:
        max_bytes: bytes to take.
        name: name of the data in messages.

    Raises:
        ValueError: if this Python has no readable sources.
    """
    root = Path(sysconfig.get_path("stdlib"))
    sources = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [
            name for name in subfolders if name not in _LEFT_OUT_FOLDERS and not name.startswith(_LEFT_OUT_PREFIXES)
        ]
        for name in names:
            if name.endswith(".py") and not name.startswith(_LEFT_OUT_PREFIXES):
                path = Path(folder, name)
                sources.append(TextFile(path.relative_to(root).as_posix(), path, path.stat().st_size))
    if not sources:
        raise ValueError(f"{name}: no .py file under {root}; this Python ships its standard library without source")
    files, remaining = [], max_bytes
    for file in sorted(sources):
        if remaining <= 0:
            break
        files.append(file._replace(size=min(file.size, remaining)))
        remaining -= file.size
    return files


def texts_of_split(files: list[TextFile], fraction: float, split: str) -> tuple[list[TextFile], list[bytes], str]:
    """Return the files of a split, its text of each, and whether "files" are held out or the "tail" of all."""
    chosen, held_out = _one_split(files, fraction, split)
    texts = [file.path.read_bytes()[: file.size] for file in chosen]
    if held_out == "tail":
        length = sum(map(len, texts))
        texts = _cut(texts, length - round(length * fraction))[split == "validation"]
    return chosen, texts, held_out


def _one_split(files: list[TextFile], fraction: float, split: str) -> tuple[list[TextFile], str]:
    """Return the files of a split and how it is held out; with "tail" all files, which the caller cuts."""
    held_out = [_fraction_of(file.name) < fraction for file in files]
    share = sum(file.size for file, is_out in zip(files, held_out, strict=True) if is_out) / max(
        1, sum(f.size for f in files)
    )
    if fraction / 3 <= share <= 3 * fraction and share < 1:
        return [
            file for file, is_out in zip(files, held_out, strict=True) if is_out == (split == "validation")
        ], "files"
    return files, "tail"


def _cut(texts: list[bytes], at: int) -> tuple[list[bytes], list[bytes]]:
    """Return the texts before and after a byte of all of them together; the text with the byte is cut in two."""
    for number, text in enumerate(texts):
        if at < len(text):
            return [*texts[:number], text[:at]], [text[at:], *texts[number + 1 :]]
        at -= len(text)
    return texts, []


def _fraction_of(name: str) -> float:
    """Return a number in [0, 1) that depends on the name alone."""
    digest = hashlib.sha256(name.encode("utf-8", "surrogateescape")).digest()
    return int.from_bytes(digest[:8], "big") / 2.0**64
