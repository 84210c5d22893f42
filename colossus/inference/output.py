"""Generated text on its way to standard output. No torch."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Sequence
from typing import Any, TextIO

from colossus.inference.tokenizers import Tokenizer

STOPPED = "stopped"
#: control characters but new line and tab (category Cc), and those that order letters from right to left by force
_OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


class Texts:
    """The prompts and what follows them, printed as it comes.

    One prompt: the prompt, then its text as its tokens come. Several: each under a heading, in their order, when it is
    whole. As JSON: nothing before the end. Without a tokenizer tokens are numbers with commas.

    Args:
        prompts: as text; None where they were given as tokens.
    """

    def __init__(
        self,
        prompts: Sequence[str] | None,
        tokens: Sequence[Sequence[int]],
        tokenizer: Tokenizer | None,
        *,
        is_json: bool,
        out: TextIO | None = None,
    ) -> None:
        self._out = out or sys.stdout
        with contextlib.suppress(AttributeError, ValueError):
            self._out.reconfigure(errors="replace")  # type: ignore[union-attr]
        self._prompts, self._tokenizer = prompts, tokenizer
        self.prompt_tokens = [list(each) for each in tokens]
        self.tokens: list[list[int]] = [[] for _ in tokens]
        self.texts = ["" for _ in tokens]
        self.ended: list[str | None] = [None] * len(tokens)
        self._streams = [tokenizer.stream(each) if tokenizer is not None else None for each in tokens]
        self._is_json, self._streaming = is_json, not is_json and len(tokens) == 1
        self._next = 0
        self._held = ""
        if self._streaming:
            self._write(self._prompt(0))

    def add(self, tokens: Sequence[int | None], ended: Sequence[str | None]) -> None:
        """What a step gave."""
        for row, token in enumerate(tokens):
            if token is not None:
                self.tokens[row].append(token)
                self._add_text(row, self._text_of(row, token))
            if ended[row] is not None and self.ended[row] is None:
                self._end(row, ended[row])
        self._print_whole()

    def stop(self) -> None:
        """Nothing more comes: what is there is printed."""
        for row, ended in enumerate(self.ended):
            if ended is None:
                self._end(row, STOPPED)
        self._print_whole()

    def as_data(self) -> list[dict[str, Any]]:
        """One entry for each prompt."""
        return [
            {
                "prompt": self._prompt(row) if self._prompts is not None else None,
                "prompt_tokens": self.prompt_tokens[row],
                "text": self.texts[row] if self._tokenizer is not None else None,
                "tokens": self.tokens[row],
                "ended": self.ended[row],
            }
            for row in range(len(self.tokens))
        ]

    def _text_of(self, row: int, token: int) -> str:
        stream = self._streams[row]
        return f",{token}" if stream is None else stream.push(token)

    def _prompt(self, row: int) -> str:
        if self._prompts is None:
            return ",".join(map(str, self.prompt_tokens[row]))
        return self._prompts[row].encode("utf-8", "surrogateescape").decode("utf-8", "replace")

    def _add_text(self, row: int, text: str) -> None:
        self.texts[row] += text
        if self._streaming:
            self._write(text)

    def _end(self, row: int, reason: str | None) -> None:
        stream = self._streams[row]
        if stream is not None:
            self._add_text(row, stream.finish())
        self.ended[row] = reason
        if self._streaming and not (self._prompt(row) + self.texts[row]).endswith("\n"):
            self._write("\n")

    def _print_whole(self) -> None:
        if self._is_json or self._streaming:
            return
        while self._next < len(self.ended) and self.ended[self._next] is not None:
            row, count = self._next, len(self.ended)
            self._next += 1
            text = f"{self._prompt(row)}{self.texts[row]}"
            end = "" if text.endswith("\n") else "\n"
            self._write(f"{'' if row == 0 else chr(10)}--- prompt {row + 1} of {count} ---\n{text}{end}")

    def _write(self, text: str) -> None:
        if self._out.isatty():
            text = self._held + text
            self._held = "\r" if text.endswith("\r") else ""  # what follows says whether it ends a line
            text = harmless(text.removesuffix("\r"))
        if text:
            self._out.write(text)
            self._out.flush()


def harmless(text: str) -> str:
    """Without what a terminal would obey: a model may have learned escape sequences, or to turn lines around."""
    return _OBEYED.sub("\ufffd", text.replace("\r\n", "\n"))
