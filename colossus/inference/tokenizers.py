"""From text to tokens and back, as it comes. No torch.

``bytes``: UTF-8. ``tokenizer.json``: by the library `tokenizers`, an optional extra. None: tokens are numbers.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from colossus.checkpoint.manifest import BYTES, TOKENIZER_FILE
from colossus.config import ConfigError
from colossus.data.tokenizer import load_tokenizer
from colossus.inference.source import Source

_REPLACEMENT = "\ufffd"
#: tokens after which what is no character will not become one
_MOST_PENDING = 16
#: special tokens that end a text, where no file says which does
_ENDS = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<|eot_id|>", "<|im_end|>", "<eos>", "[EOS]")
_STARTS = ("<s>", "<|begin_of_text|>", "<bos>", "[BOS]", "<|endoftext|>")
#: files beside a tokenizer.json that may say it, the first that does
_CONFIGS = ("generation_config.json", "config.json", "tokenizer_config.json")


class TextStream(Protocol):
    """Text as its tokens come."""

    def push(self, token: int) -> str:
        """The text that is certain with one more token; empty in the middle of a character."""

    def finish(self) -> str:
        """What is left when no more tokens come."""


class Tokenizer(Protocol):
    """How text becomes tokens.

    Attributes:
        num_ids: ids from this on stand for nothing.
        stop: ids that end a text.
    """

    num_ids: int
    stop: tuple[int, ...]

    def encode(self, text: str) -> list[int]:
        """The tokens of a prompt, one at least.

        Raises:
            ConfigError: for a prompt without any.
        """

    def stream(self, prompt: Sequence[int] = ()) -> TextStream:
        """The text behind the tokens of a prompt."""


class ByteTokenizer:
    """One token for each byte of UTF-8."""

    num_ids = 256
    stop: tuple[int, ...] = ()

    def encode(self, text: str) -> list[int]:
        if not text:
            raise ConfigError(
                "the prompt is empty, and text as bytes has no token that begins one: give at least a character, "
                "--prompt $'\\n' (a new line), say"
            )
        return list(text.encode("utf-8", "surrogateescape"))  # bytes of a shell or a pipe that are no UTF-8 stay

    def stream(self, prompt: Sequence[int] = ()) -> ByteStream:
        return ByteStream()


class ByteStream:
    """Bytes to text: a character comes when it is whole, invalid bytes as U+FFFD, as ``bytes.decode("replace")``."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        return self._decoder.decode(bytes([token])) if 0 <= token < 256 else self.finish() + _REPLACEMENT

    def finish(self) -> str:
        left = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return left


class FileTokenizer:
    """A ``tokenizer.json`` of Hugging Face.

    Args:
        token_ids: ``eos_token_id`` and the like, where no file beside it says them.
        adds_special: whether a prompt begins as its template says (``<s>``, say). Datasets of colossus add nothing.

    Raises:
        ConfigError: without the library `tokenizers`, and for a file that it cannot read.
    """

    def __init__(self, file: Path, token_ids: Mapping[str, Any] | None = None, *, adds_special: bool = True) -> None:
        try:
            self._tokenizer: Any = load_tokenizer(file.read_bytes(), str(file))
        except (OSError, ValueError) as error:
            raise ConfigError(f"{error}; prompts of numbers need no tokenizer: --tokens 1,2,3") from None
        self._file, self._adds_special = file, adds_special
        self.num_ids = 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
        told = {**(token_ids or {}), **_told(file.parent)}
        self.stop = self._ids(told, "eos", _ENDS)
        self._start = self._ids(told, "bos", _STARTS)[:1]

    def encode(self, text: str) -> list[int]:
        text = text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
        encoded = self._tokenizer.encode(text, add_special_tokens=self._adds_special)
        ids, is_added = list(encoded.ids), encoded.special_tokens_mask  # 0 of tokens that the text itself names
        while len(ids) > 1 and ids[-1] in self.stop and is_added[len(ids) - 1]:  # a template that ends the text
            ids.pop()
        ids = ids or list(self._start)
        if not ids:
            raise ConfigError(f"the prompt is empty, and {self._file} names no token that begins a text: give one")
        return ids

    def stream(self, prompt: Sequence[int] = ()) -> FileStream:
        return FileStream(lambda ids: str(self._tokenizer.decode(ids, skip_special_tokens=True)), prompt)

    def _ids(self, told: Mapping[str, Any], which: str, names: Sequence[str]) -> tuple[int, ...]:
        """The tokens that end or begin a text: as a config beside the file says, else special ones by their names."""
        ids = tuple(each for each in _listed(told.get(f"{which}_token_id")) if each < self.num_ids)
        name = told.get(f"{which}_token")
        name = name.get("content") if isinstance(name, dict) else name
        if not ids and isinstance(name, str) and self._tokenizer.token_to_id(name) is not None:
            return (self._tokenizer.token_to_id(name),)
        if ids:
            return ids
        special = {each.content: number for number, each in self._tokenizer.get_added_tokens_decoder().items()}
        return tuple(special[name] for name in names if name in special)[:1]


class FileStream:
    """Tokens to text by a function that decodes a list of them.

    What a token adds depends on those before it (spaces, pieces of a character), so text is the difference of two
    decodings, of a window that begins where a character was whole.

    Args:
        decode: ids -> text; U+FFFD for bytes that are no character (yet).
        prompt: ids before the first, whose text is known: a decoder may treat the first token of all otherwise (Llama's
            takes its space).
    """

    def __init__(self, decode: Callable[[list[int]], str], prompt: Sequence[int] = ()) -> None:
        self._decode = decode
        self._ids = list(prompt)
        self._whole = len(self._ids)  # tokens of the window whose text was whole when they were last looked at
        self._shown = len(decode(self._ids))  # letters of the window that were given

    def push(self, token: int) -> str:
        self._ids.append(token)
        text = self._decode(self._ids)
        # a character may be incomplete, and a decoder may show all bytes around it so until it is whole
        if text.endswith(_REPLACEMENT) and len(self._ids) - self._whole < _MOST_PENDING:
            return ""
        new = self._show(text)
        if begun := len(self._decode(self._ids[self._whole :])):  # special tokens have no text, and begin no window
            del self._ids[: self._whole]
            self._whole, self._shown = len(self._ids), begun
        return new

    def finish(self) -> str:
        return self._show(self._decode(self._ids))

    def _show(self, text: str) -> str:
        new, self._shown = text[self._shown :], max(self._shown, len(text))
        return new


def tokenizer_of(source: Source, given: str | None) -> Tokenizer | None:
    """The tokenizer that a user names, else the one that the checkpoint records; None where it records none.

    Args:
        given: "bytes", a tokenizer.json, or a folder with one.

    Raises:
        ConfigError: when it is not there.
    """
    name = given if given is not None else source.tokenizer
    if name is None:
        return None
    if name == BYTES:
        return ByteTokenizer()
    file = Path(name).expanduser() if given is not None else source.folder / name
    if file.is_dir():
        file = file / TOKENIZER_FILE
    if not file.is_file():
        where = "--tokenizer" if given is not None else f"{source.folder}: its tokenizer"
        raise ConfigError(f"{where} {name}: there is no file {file}; it is 'bytes', or the path of a {TOKENIZER_FILE}")
    # as the model has seen text begin: Hugging Face's with its template, our datasets' without
    is_theirs = source.is_foreign or (bool(source.token_ids) and source.manifest.is_weights_only)
    return FileTokenizer(file, source.token_ids, adds_special=is_theirs)


def stop_ids(source: Source) -> tuple[int, ...]:
    """The tokens that end a text, as the files of a checkpoint say, where there is no tokenizer."""
    return _listed({**source.token_ids, **_told(source.folder)}.get("eos_token_id"))


def without_tokenizer(source: Source) -> str:
    """What to do with a checkpoint that does not say how text became tokens."""
    return (
        f"{source.folder}: does not say how its text became tokens: give --tokenizer bytes (UTF-8, as "
        f"data = dict(type='PythonStdlib') has it), --tokenizer PATH of a {TOKENIZER_FILE}, or the prompt as numbers, "
        f"--tokens 1,2,3"
    )


def _listed(given: Any) -> tuple[int, ...]:
    """Ids out of a number, a list of them, or something else."""
    listed = given if isinstance(given, list) else [given]
    return tuple(each for each in listed if type(each) is int and each >= 0)


def _told(folder: Path) -> dict[str, Any]:
    """What the files beside a tokenizer say of the tokens that begin and end a text."""
    found: dict[str, Any] = {}
    for name in reversed(_CONFIGS):
        try:
            told = json.loads((folder / name).read_bytes())
        except (OSError, ValueError):
            continue
        if isinstance(told, dict):
            found |= {key: value for key, value in told.items() if key[:3] in ("eos", "bos") and value is not None}
    return found
