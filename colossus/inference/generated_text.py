"""From text to tokens, and back to standard output as they come. No torch."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from colossus.checkpoint.manifest import BYTES, TOKENIZER_FILE
from colossus.config import ConfigError
from colossus.config.user_path import user_path
from colossus.data.tokenizer import load_tokenizer
from colossus.inference.config import WeightSource

_REPLACEMENT = "\ufffd"


class TextStream:
    """The text behind a prompt as its tokens come: a character when it is whole, and nothing is taken back.

    What a token adds may depend on those before it (a decoder takes the space where a text begins), so it is the
    difference between two texts: of the last tokens that are shown, with and without those that came after them.
    """

    def __init__(self, decode: Callable[[list[int]], str], prompt: Sequence[int] = ()) -> None:
        self._decode, self._ids, self._num_shown = decode, list(prompt), len(prompt)

    def push(self, token: int) -> str:
        """The text that is certain with one more token; empty in the middle of a character."""
        self._ids.append(token)
        text = self._decode(self._ids)
        return "" if text.endswith(_REPLACEMENT) else self._show(text)

    def finish(self) -> str:
        """What is left when no more tokens come."""
        return self._show(self._decode(self._ids))

    def _show(self, text: str) -> str:
        new = text[len(self._decode(self._ids[: self._num_shown])) :]
        if new:
            del self._ids[: self._num_shown]
            self._num_shown = len(self._ids)
        return new


@dataclass(frozen=True)
class Tokenizer:
    """How text becomes tokens, and tokens text.

    Attributes:
        num_ids: ids from this on stand for nothing.
        stop: ids that end a text.
    """

    encode: Callable[[str], list[int]]
    decode: Callable[[list[int]], str]
    num_ids: int
    stop: tuple[int, ...] = ()


def byte_tokenizer() -> Tokenizer:
    """One token for each byte of UTF-8; in prompts of a shell or a pipe also of what is none."""
    return Tokenizer(
        encode=lambda text: list(text.encode("utf-8", "surrogateescape")),
        decode=lambda ids: bytes(ids).decode("utf-8", "replace"),
        num_ids=256,
    )


def file_tokenizer(file: Path, token_ids: Mapping[str, Any], *, adds_special: bool = True) -> Tokenizer:
    """A ``tokenizer.json`` of Hugging Face.

    Args:
        token_ids: ``eos_token_id`` and the like, where no file beside it says them.
        adds_special: whether a prompt begins as its template says (``<s>``, say). Datasets of colossus add nothing.

    Raises:
        ConfigError: without the library `tokenizers`, and for a file that it cannot read.
    """
    try:
        library = load_tokenizer(file.read_bytes(), f"the tokenizer {file}")
    except (OSError, ValueError) as error:
        raise ConfigError(f"--tokenizer: {error}; prompts of numbers need no tokenizer: --tokens 1,2,3") from None
    start = special_ids(file.parent, token_ids, "bos_token_id")[:1]
    return Tokenizer(
        encode=lambda text: library.encode(text, add_special_tokens=adds_special).ids or list(start),
        decode=library.decode,
        num_ids=1 + max(library.get_vocab(with_added_tokens=True).values(), default=-1),
        stop=special_ids(file.parent, token_ids, "eos_token_id"),
    )


def tokenizer_of(source: WeightSource, given: str | None) -> Tokenizer:
    """The tokenizer that a user names ("bytes", a tokenizer.json, or a folder with one), else that of the checkpoint.

    Raises:
        ConfigError: when it is not there, or nothing says which.
    """
    name = given if given is not None else source.manifest.tokenizer
    if name is None:
        raise ConfigError(
            f"{source.folder}: does not say how its text became tokens: give --tokenizer bytes (UTF-8), --tokenizer "
            f"PATH of a {TOKENIZER_FILE}, or the prompt as numbers, --tokens 1,2,3"
        )
    if name == BYTES:
        return byte_tokenizer()
    file = user_path(name) if given is not None else source.folder / name
    file = file / TOKENIZER_FILE if file.is_dir() else file
    # as the model has seen text begin: Hugging Face's with its template, our datasets' without
    is_theirs = source.is_foreign or (bool(source.token_ids) and source.manifest.is_weights_only)
    return file_tokenizer(file, source.token_ids, adds_special=is_theirs)


def special_ids(folder: Path, token_ids: Mapping[str, Any], key: str) -> tuple[int, ...]:
    """The tokens that a folder's files of Hugging Face name by a key, ``eos_token_id`` say.

    Args:
        token_ids: of the model, where no file says.
    """
    found = token_ids.get(key)
    for name in ("config.json", "generation_config.json"):  # the last that says
        with contextlib.suppress(OSError, ValueError, AttributeError):
            said = json.loads((folder / name).read_bytes()).get(key)
            found = found if said is None else said
    return tuple(each for each in (found if isinstance(found, list) else [found]) if type(each) is int and each >= 0)


class Texts:
    """The prompts and what follows them: the text of one prompt is printed as its tokens come, of several at the end.
    Without a tokenizer tokens are numbers with commas.

    Args:
        prompts: as text; None where they were given as tokens.
        out: where to print; None prints nothing.
    """

    def __init__(
        self,
        prompts: Sequence[str] | None,
        tokens: Sequence[Sequence[int]],
        tokenizer: Tokenizer | None,
        out: TextIO | None,
    ) -> None:
        self._prompts = prompts
        self._shown = prompts or [",".join(map(str, each)) for each in tokens]
        self._out, self._is_streamed = out, len(tokens) == 1
        self.prompt_tokens = tokens
        self._streams = [TextStream(tokenizer.decode, each) if tokenizer else None for each in tokens]
        self.tokens: list[list[int]] = [[] for _ in tokens]
        self.texts = ["" for _ in tokens]
        self.ended: list[str | None] = [None] * len(tokens)
        #: when the first step and the last one had ended, and tokens made by then
        self._marks: list[tuple[float, int]] = []
        if self._is_streamed:
            self._write(self._shown[0])

    def add(self, tokens: Sequence[int | None], ended: Sequence[str | None]) -> None:
        """What a step gave."""
        for row, token in enumerate(tokens):
            if token is not None:
                self.tokens[row].append(token)
                stream = self._streams[row]
                self._add_text(row, f",{token}" if stream is None else stream.push(token))
        self.ended = list(ended)
        self._marks[1:] = [(time.perf_counter(), sum(map(len, self.tokens)))]

    def finish(self) -> None:
        """Nothing more comes: what is there is printed."""
        count = len(self.tokens)
        for row, stream in enumerate(self._streams):
            self.ended[row] = self.ended[row] or "stopped"
            self._add_text(row, "" if stream is None else stream.finish())
            text = self._shown[row] + self.texts[row]
            end = "" if text.endswith("\n") else "\n"
            heading = f"{'' if row == 0 else chr(10)}--- prompt {row + 1} of {count} ---\n"
            self._write(end if self._is_streamed else heading + text + end)

    def tokens_per_second(self) -> float | None:
        """Of all prompts together, made after the first step."""
        if len(self._marks) < 2:
            return None
        (began, before), (ended, after) = self._marks
        return (after - before) / (ended - began)

    def as_data(self) -> list[dict[str, Any]]:
        """One entry for each prompt."""
        return [
            {
                "prompt": self._prompts[row] if self._prompts is not None else None,
                "prompt_tokens": list(self.prompt_tokens[row]),
                "text": self.texts[row] if self._streams[row] is not None else None,
                "tokens": self.tokens[row],
                "ended": self.ended[row],
            }
            for row in range(len(self.tokens))
        ]

    def _add_text(self, row: int, text: str) -> None:
        self.texts[row] += text
        if self._is_streamed:
            self._write(text)

    def _write(self, text: str) -> None:
        if self._out is not None:
            self._out.write(text)
            self._out.flush()
