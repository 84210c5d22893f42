"""From text to tokens, and back to standard output as they come. No torch.

``bytes``: UTF-8. ``tokenizer.json``: by the library `tokenizers`, an optional extra. None: tokens are numbers.
"""

from __future__ import annotations

import codecs
import contextlib
import importlib
import json
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from colossus.checkpoint.manifest import BYTES, TOKENIZER_FILE
from colossus.config import ConfigError
from colossus.data.tokenizer import load_tokenizer
from colossus.inference.config import Source

_REPLACEMENT = "\ufffd"
#: control characters but new line and tab (category Cc), and those that order letters from right to left by force
_OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


class ByteTokenizer:
    """One token for each byte of UTF-8.

    Attributes:
        num_ids: ids from this on stand for nothing.
        stop: ids that end a text.
    """

    num_ids = 256
    stop: tuple[int, ...] = ()

    def encode(self, text: str) -> list[int]:
        """The tokens of a prompt; bytes of a shell or a pipe that are no UTF-8 stay."""
        return list(text.encode("utf-8", "surrogateescape"))

    def stream(self, prompt: Sequence[int] = ()) -> _ByteStream:
        """What gives the text behind the tokens of a prompt."""
        return _ByteStream()


class _ByteStream:
    """Bytes to text: a character comes when it is whole, invalid bytes as U+FFFD, as ``bytes.decode("replace")``."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        """The text that is certain with one more token; empty in the middle of a character."""
        return self._decoder.decode(bytes([token])) if 0 <= token < 256 else self.finish() + _REPLACEMENT

    def finish(self) -> str:
        """What is left when no more tokens come."""
        left = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return left


class FileTokenizer:
    """A ``tokenizer.json`` of Hugging Face; attributes and methods are those of `ByteTokenizer`.

    Args:
        token_ids: ``eos_token_id`` and the like, where no file beside it says them.
        adds_special: whether a prompt begins as its template says (``<s>``, say). Datasets of colossus add nothing.

    Raises:
        ConfigError: without the library `tokenizers`, and for a file that it cannot read.
    """

    def __init__(self, file: Path, token_ids: Mapping[str, Any] | None = None, *, adds_special: bool = True) -> None:
        try:
            self._tokenizer = load_tokenizer(file.read_bytes(), f"the tokenizer {file}")
        except (OSError, ValueError) as error:
            raise ConfigError(f"--tokenizer: {error}; prompts of numbers need no tokenizer: --tokens 1,2,3") from None
        self._adds_special = adds_special
        self.num_ids = 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
        self.stop = special_ids(file.parent, token_ids or {}, "eos_token_id")
        self._start = special_ids(file.parent, token_ids or {}, "bos_token_id")[:1]

    def encode(self, text: str) -> list[int]:
        ids = self._tokenizer.encode(_printable(text), add_special_tokens=self._adds_special).ids
        return ids or list(self._start)

    def stream(self, prompt: Sequence[int] = ()) -> _FileStream:
        return _FileStream(self._tokenizer, prompt)


class _FileStream:
    """The library's `DecodeStream`, which keeps to itself what is no character yet.

    Args:
        prompt: ids before the first, whose text is known: what a token adds depends on those before it (a decoder
            takes the space of the first of all).
    """

    def __init__(self, tokenizer: Any, prompt: Sequence[int]) -> None:
        self._tokenizer, self._library = tokenizer, importlib.import_module("tokenizers.decoders")
        self._begin()
        for token in prompt:
            self.push(token)

    def _begin(self) -> None:
        self._stream, self._kept = self._library.DecodeStream(skip_special_tokens=True), list[int]()

    def push(self, token: int) -> str:
        self._kept.append(token)
        try:
            text = self._stream.step(self._tokenizer, token)
        except Exception:  # bytes that can be no character any more, for which the library raises a bare one
            return self.finish()
        if text is None:
            return ""
        self._kept.clear()
        return str(text)

    def finish(self) -> str:
        text = str(self._tokenizer.decode(self._kept, skip_special_tokens=True))
        self._begin()
        return text


Tokenizer = ByteTokenizer | FileTokenizer


def tokenizer_of(source: Source, given: str | None) -> Tokenizer:
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
        return ByteTokenizer()
    file = Path(name).expanduser() if given is not None else source.folder / name
    file = file / TOKENIZER_FILE if file.is_dir() else file
    # as the model has seen text begin: Hugging Face's with its template, our datasets' without
    is_theirs = source.is_foreign or (bool(source.token_ids) and source.manifest.is_weights_only)
    return FileTokenizer(file, source.token_ids, adds_special=is_theirs)


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
    """The prompts and what follows them, printed: the text of one prompt as its tokens come, of several under headings
    at the end. Without a tokenizer tokens are numbers with commas.

    Args:
        prompts: as text; None where they were given as tokens.
        out: where to print, without what a terminal would obey; None prints nothing.
    """

    def __init__(
        self,
        prompts: Sequence[str] | None,
        tokens: Sequence[Sequence[int]],
        tokenizer: Tokenizer | None,
        out: TextIO | None,
    ) -> None:
        self._prompts = None if prompts is None else [_printable(prompt) for prompt in prompts]
        self._shown = self._prompts or [",".join(map(str, each)) for each in tokens]
        self._out, self._is_streamed = out, len(tokens) == 1
        self.prompt_tokens, self._streams = tokens, [tokenizer.stream(each) if tokenizer else None for each in tokens]
        self.tokens: list[list[int]] = [[] for _ in tokens]
        self.texts = ["" for _ in tokens]
        self.ended: list[str | None] = [None] * len(tokens)
        #: when, and tokens made by then: at the beginning, after the first step, after the last one
        self._marks = [(time.perf_counter(), 0)]
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
        self._marks[2:] = [(time.perf_counter(), sum(map(len, self.tokens)))]

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

    def speeds(self) -> dict[str, float | None]:
        """Tokens per second of all prompts together: of the first step (prefill), made after it (decode)."""
        taken = min(map(len, self.prompt_tokens)) * len(self.prompt_tokens)
        (began, _), *later = self._marks
        return {
            "prefill": taken / (later[0][0] - began) if later else None,
            "decode": (later[1][1] - later[0][1]) / (later[1][0] - later[0][0]) if len(later) > 1 else None,
        }

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
            # a model may have learned escape sequences, or to turn lines around
            self._out.write(_OBEYED.sub(_REPLACEMENT, text.replace("\r", "")) if self._out.isatty() else text)
            self._out.flush()


def _printable(prompt: str) -> str:
    return prompt.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
