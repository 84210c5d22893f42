"""Preparation: the documents of an encoder as a folder of memory-mapped arrays, made once for a machine.

Pieces are encoded by several processes, each into a file. A preparation that was stopped goes on with the pieces that
it lacks. The folder appears when it is whole.
"""

from __future__ import annotations

import fcntl
import json
import multiprocessing
import shutil
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

import numpy as np

from colossus.data.documents.encoder import Encoder
from colossus.data.documents.piece_file import PieceSize, read_piece, read_size, write_piece
from colossus.data.documents.row_source import Piece, fingerprint_of
from colossus.data.documents.token_documents import (
    DESCRIPTION,
    LINES,
    OFFSETS,
    TOKENS,
    TRAINED,
    VERSION,
    PreparedDocuments,
    read_description,
)
from colossus.data.tokenizer import cache_folder
from colossus.progress import progress

_processes = ContextVar("processes", default=1)


def folder_of(encoder: Encoder) -> Path:
    """Return the folder of an encoder's prepared documents, in the cache of the user.

    It is named by their fingerprint and by the versions of what makes it.

    Raises:
        ConfigError: if the home is not known.
    """
    return cache_folder("documents") / fingerprint_of(VERSION, encoder.library_version(), encoder.fingerprint)[:32]


@contextmanager
def preparing_with(processes: int) -> Iterator[None]:
    """Prepare documents by this number of processes inside of the context."""
    before = _processes.set(processes)
    try:
        yield
    finally:
        _processes.reset(before)


def prepared(encoder: Encoder) -> PreparedDocuments:
    """Return the documents of an encoder; prepare them if that was not done before.

    Args:
        encoder: the encoder; the folder is `folder_of` it.

    Raises:
        ValueError: for a bad row, or a folder that cannot be written.
    """
    final = folder_of(encoder)
    home = final.parent
    if read_description(final) is None:
        try:
            home.mkdir(parents=True, exist_ok=True)
            with _alone(home / f"{final.name}.lock"):
                if read_description(final) is None:
                    _prepare(encoder, _processes.get(), final)
        except OSError as error:
            raise ValueError(f"documents cannot be prepared in {home}: {error}; set XDG_CACHE_HOME") from error
    name = encoder.tree()[0]
    documents = PreparedDocuments(final, encoder.tokenizer, name, encoder.source)
    documents.children = encoder.tree()[1:]
    return documents


@contextmanager
def _alone(lock: Path) -> Iterator[None]:
    """Wait until no other process prepares the same; locks are released when their process ends."""
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _prepare(encoder: Encoder, processes: int, final: Path) -> None:
    work = final.with_name(f"{final.name}.part")
    work.mkdir(exist_ok=True)
    try:
        pieces = encoder.source.pieces()
    except OSError as error:
        raise ValueError(f"{encoder.source.name} cannot be read: {error}") from error
    files = [work / f"{number:06}.npz" for number in range(len(pieces))]
    _encode(encoder, [(piece, file) for piece, file in zip(pieces, files, strict=True) if not file.exists()], processes)
    merged = work / "merged"
    shutil.rmtree(merged, ignore_errors=True)
    merged.mkdir()
    _merge(encoder, pieces, files, merged)
    shutil.rmtree(final, ignore_errors=True)  # one whose description cannot be read
    merged.rename(final)
    shutil.rmtree(work, ignore_errors=True)


def _encode(encoder: Encoder, jobs: list[tuple[Piece, Path]], processes: int) -> None:
    began, tokens = time.perf_counter(), 0
    sizes: list[PieceSize] = []

    def tell(size: PieceSize) -> None:
        nonlocal tokens
        sizes.append(size)
        tokens += size.tokens
        speed = tokens / (time.perf_counter() - began)
        progress(f"documents: piece {len(sizes)} of {len(jobs)}, {tokens:,} tokens, {speed:,.0f} a second")

    if processes == 1 or len(jobs) < 2:
        for piece, file in jobs:
            tell(write_piece(encoder, piece, file))
    else:
        context = multiprocessing.get_context("spawn")  # threads of the tokenizer do not survive a fork
        with ProcessPoolExecutor(min(processes, len(jobs)), context) as pool:
            futures = [pool.submit(write_piece, encoder, piece, file) for piece, file in jobs]
            try:
                for future in as_completed(futures):
                    tell(future.result())
            except BrokenProcessPool:
                raise ValueError(
                    "a process that prepares documents was killed, perhaps for its memory; what is done is kept: go on "
                    "with fewer --processes"
                ) from None
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
    progress("")


def _merge(encoder: Encoder, pieces: list[Piece], files: list[Path], folder: Path) -> None:
    """Write the arrays of all pieces one after the other, and at last the description."""
    sizes = [read_size(file) for file in files]
    num_documents, num_tokens = sum(size.documents for size in sizes), sum(size.tokens for size in sizes)
    tokens = _array(folder / TOKENS, np.dtype(encoder.dtype), num_tokens)
    lines = _array(folder / LINES, np.dtype(np.int64), num_documents)
    offsets = _array(folder / OFFSETS, np.dtype(np.int64), num_documents + 1)
    trained = _array(folder / TRAINED, np.dtype(np.uint8), num_tokens) if any(size.trained for size in sizes) else None
    document = token = 0
    starts: list[tuple[int, str]] = []
    skipped: Counter[str] = Counter()
    for piece, file, size in zip(pieces, files, sizes, strict=True):
        content = read_piece(file, size)
        of_documents, of_tokens = slice(document, document + size.documents), slice(token, token + size.tokens)
        lines[of_documents], tokens[of_tokens] = content.lines, content.tokens
        offsets[document + 1 : of_documents.stop + 1] = token + np.cumsum(content.lengths)
        if trained is not None:
            trained[of_tokens] = content.trained
        starts.append((document, piece.title))
        skipped.update(size.skipped)
        document, token = of_documents.stop, of_tokens.stop
    for array in (tokens, lines, offsets, trained):
        if isinstance(array, np.memmap):
            array.flush()
    about = dict(
        version=VERSION, fingerprint=encoder.fingerprint, tokenizer=encoder.tokenizer.sha256, tree=encoder.tree(),
        vocab_size=max((size.vocab_size for size in sizes), default=0), skipped=skipped, pieces=starts,
    )  # fmt: skip
    (folder / DESCRIPTION).write_text(json.dumps(about, indent=1))


def _array(file: Path, dtype: np.dtype, count: int) -> np.ndarray:
    """Return an array that is a file; numpy maps none without items."""
    if not count:
        np.save(file, np.zeros(0, dtype))
        return np.zeros(0, dtype)
    return np.lib.format.open_memmap(file, "w+", dtype, (count,))
