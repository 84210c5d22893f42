"""Text to tokens, and tokens to text on standard output as they come. No torch."""

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
    """The text behind a prompt as its tokens come. A character appears when it is complete, and is never taken back.

    The text of a token may depend on those before it (a decoder drops the space where a text begins). So the new text
    is the difference between two texts: of the last tokens that are shown, with and without those that came after them.
    """

    def __init__(self, decode: Callable[[list[int]], str], prompt: Sequence[int] = ()) -> None:
        self._decode, self._ids, self._num_shown = decode, list(prompt), len(prompt)

    def push(self, token: int) -> str:
        """Return the new text that is certain with one more token; it is empty in the middle of a character."""
        self._ids.append(token)
        text = self._decode(self._ids)
        return "" if text.endswith(_REPLACEMENT) else self._show(text)

    def finish(self) -> str:
        """Return the rest of the text when no more tokens come."""
        return self._show(self._decode(self._ids))

    def _show(self, text: str) -> str:
        new = text[len(self._decode(self._ids[: self._num_shown])) :]
        if new:
            del self._ids[: self._num_shown]
            self._num_shown = len(self._ids)
        return new


@dataclass(frozen=True)
class Tokenizer:
    """The functions between text and tokens.

    Attributes:
        num_ids: ids from this on stand for no text.
        stop: ids that end a text.
    """

    encode: Callable[[str], list[int]]
    decode: Callable[[list[int]], str]
    num_ids: int
    stop: tuple[int, ...] = ()


def byte_tokenizer() -> Tokenizer:
    """Return the tokenizer of UTF-8 bytes. It also encodes bytes of a shell or a pipe that are no UTF-8."""
    return Tokenizer(
        encode=lambda text: list(text.encode("utf-8", "surrogateescape")),
        decode=lambda ids: bytes(ids).decode("utf-8", "replace"),
        num_ids=256,
    )


def file_tokenizer(file: Path, token_ids: Mapping[str, Any], *, adds_special: bool = True) -> Tokenizer:
    """Return the tokenizer of a ``tokenizer.json`` of Hugging Face.

    Args:
        token_ids: ``eos_token_id`` and the like, where no file beside it has them.
        adds_special: a prompt begins with the tokens of its template (``<s>``, say). Datasets of colossus add none.

    Raises:
        ConfigError: the library `tokenizers` is missing, or cannot read the file.
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


def tokenizer_of(source: WeightSource, choice: str | None) -> Tokenizer:
    """Return the user's tokenizer ("bytes", a tokenizer.json, or a folder with one), else the checkpoint's.

    Raises:
        ConfigError: it does not exist, or neither names one.
    """
    name = choice if choice is not None else source.manifest.tokenizer
    if name is None:
        raise ConfigError(
            f"{source.folder}: records no tokenizer: pass --tokenizer bytes (UTF-8), --tokenizer PATH of a "
            f"{TOKENIZER_FILE}, or the prompt as numbers, --tokens 1,2,3"
        )
    if name == BYTES:
        return byte_tokenizer()
    file = user_path(name) if choice is not None else source.folder / name
    file = file / TOKENIZER_FILE if file.is_dir() else file
    # prompts begin as in training: with the template for Hugging Face's models, without it for our datasets
    is_theirs = source.is_foreign or (bool(source.token_ids) and source.manifest.is_weights_only)
    return file_tokenizer(file, source.token_ids, adds_special=is_theirs)


def special_ids(folder: Path, token_ids: Mapping[str, Any], key: str) -> tuple[int, ...]:
    """Return the ids under a key (``eos_token_id``, say) of a folder's files of Hugging Face.

    Args:
        token_ids: ids of the model, where no file has the key.
    """
    ids = token_ids.get(key)
    for name in ("config.json", "generation_config.json"):  # the later file wins
        with contextlib.suppress(OSError, ValueError, AttributeError):
            value = json.loads((folder / name).read_bytes()).get(key)
            ids = ids if value is None else value
    return tuple(id_ for id_ in (ids if isinstance(ids, list) else [ids]) if type(id_) is int and id_ >= 0)


class Texts:
    """The prompts and their continuations. A single prompt is printed as its tokens come, several at the end.

    Without a tokenizer, tokens are printed as numbers with commas.

    Args:
        prompts: as text; None where the prompts are tokens.
        out: the file for the text; None prints nothing.
    """

    def __init__(
        self,
        prompts: Sequence[str] | None,
        tokens: Sequence[Sequence[int]],
        tokenizer: Tokenizer | None,
        out: TextIO | None,
    ) -> None:
        self._prompts = prompts
        self._shown = prompts or [",".join(map(str, prompt)) for prompt in tokens]
        self._out, self._is_streamed = out, len(tokens) == 1
        self.prompt_tokens = tokens
        self._streams = [TextStream(tokenizer.decode, prompt) if tokenizer else None for prompt in tokens]
        self.tokens: list[list[int]] = [[] for _ in tokens]
        self.texts = ["" for _ in tokens]
        self.ended: list[str | None] = [None] * len(tokens)
        #: the ends of the first step and of the last one: the time, and the number of tokens by then
        self._marks: list[tuple[float, int]] = []
        if self._is_streamed:
            self._write(self._shown[0])

    def add(self, tokens: Sequence[int | None], ended: Sequence[str | None]) -> None:
        """Add the new tokens of a step."""
        for row, token in enumerate(tokens):
            if token is not None:
                self.tokens[row].append(token)
                stream = self._streams[row]
                self._add_text(row, f",{token}" if stream is None else stream.push(token))
        self.ended = list(ended)
        self._marks[1:] = [(time.perf_counter(), sum(map(len, self.tokens)))]

    def finish(self) -> None:
        """Print the rest, when no more tokens come."""
        count = len(self.tokens)
        for row, stream in enumerate(self._streams):
            self.ended[row] = self.ended[row] or "stopped"
            self._add_text(row, "" if stream is None else stream.finish())
            text = self._shown[row] + self.texts[row]
            end = "" if text.endswith("\n") else "\n"
            heading = f"{'' if row == 0 else chr(10)}--- prompt {row + 1} of {count} ---\n"
            self._write(end if self._is_streamed else heading + text + end)

    def tokens_per_second(self) -> float | None:
        """Return the speed of all prompts together after the first step."""
        if len(self._marks) < 2:
            return None
        (began, before), (ended, after) = self._marks
        return (after - before) / (ended - began)

    def as_data(self) -> list[dict[str, Any]]:
        """Return one entry for each prompt."""
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
