"""Chats as text by a template of Hugging Face, and the spans of the text that the assistant wrote. No torch.

The spans are those that the template marks itself (``{% generation %}``). Without marks they are found by rendering
beginnings of the chat: a message of the assistant begins where the chat before it ends, with the prompt for the next
message, and it ends where the chat up to it ends if it goes on. Both must be beginnings of the whole text. So a span
is what a model would write from the prompt on, with the mark that ends its turn, and without white space behind that.
"""

from __future__ import annotations

import importlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from colossus.config.user_path import user_path

Message = Mapping[str, Any]
#: (start, stop) in characters
Span = tuple[int, int]

TRAIN_ON = ("all", "last")
#: roles of messages that templates of Hugging Face know
ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython")

_MARKS = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class NoChat(ValueError):
    """Messages that are no chat, or that the template refuses."""


class NoSpans(ValueError):
    """A template that does not tell which part of a chat the assistant wrote."""


class ChatTemplate:
    """A chat template of Hugging Face, rendered by `transformers`.

    Args:
        text: the template in Jinja.
        special_tokens: ``bos_token``, ``eos_token`` and others of the tokenizer.
        variables: further variables of the template, such as ``enable_thinking``.

    Raises:
        ValueError: without `transformers`, or with one that is too old.
    """

    def __init__(self, text: str, special_tokens: Mapping[str, str], variables: Mapping[str, Any]) -> None:
        self.text, self.variables = text, {**special_tokens, **variables}
        self._end = str(self.variables.get("eos_token") or "")
        self._has_marks = _MARKS.search(text) is not None
        self._load()

    def _load(self) -> None:
        try:
            library = importlib.import_module("transformers.utils.chat_template_utils")
            self._render = library.render_jinja_template
        except (ModuleNotFoundError, AttributeError):
            raise ValueError(
                "Chat needs the library transformers, 4.53 or newer: pip install 'transformers>=4.53'"
            ) from None

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key != "_render"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._load()

    def render(self, messages: Sequence[Message], tools: Any = None, *, prompt: bool = False) -> str:
        """Return the text of a chat.

        Args:
            messages: ``role``, ``content`` and other entries of each.
            tools: descriptions of tools.
            prompt: whether the prompt for the assistant's next message follows.

        Raises:
            NoChat: if the template refuses it.
        """
        return self._rendered(messages, tools, prompt, marks=False)[0]

    def _rendered(
        self, messages: Sequence[Message], tools: Any, prompt: bool, *, marks: bool
    ) -> tuple[str, list[Span]]:
        try:
            (text,), spans = self._render(
                [list(messages)], tools, chat_template=self.text, add_generation_prompt=prompt,
                return_assistant_tokens_mask=marks, **self.variables,
            )  # fmt: skip
        except Exception as error:  # jinja2 raises those of the template, and any of its expressions
            raise NoChat(f"the template refuses its messages: {error}") from None
        return text, [(start, stop) for start, stop in spans[0]] if marks else []

    def spans(self, messages: Sequence[Message], tools: Any, train_on: str) -> tuple[str, list[Span]]:
        """Return the text of a chat, and the spans that the assistant wrote, in order.

        Args:
            messages: the chat; at least one is of the assistant.
            tools: descriptions of tools.
            train_on: ``"all"`` messages of the assistant, or the ``"last"``.

        Raises:
            NoChat: if the template refuses it.
            NoSpans: if the spans are not known.
        """
        turns = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
        if self._has_marks:
            text, spans = self._rendered(messages, tools, False, marks=True)
            if len(spans) != len(turns):
                raise NoSpans(f"the template marks {len(spans)} spans of {len(turns)} messages of the assistant")
        else:
            text = self.render(messages, tools)
            turns = turns[-1:] if train_on == "last" else turns
            spans = [self._span(text, messages, turn, tools) for turn in turns]
        spans = [(start, len(text[:stop].rstrip())) for start, stop in spans]
        if any(start >= stop for start, stop in spans):
            raise NoSpans("the template leaves nothing of a message of the assistant")
        return text, spans[-1:] if train_on == "last" else spans

    def _span(self, text: str, messages: Sequence[Message], turn: int, tools: Any) -> Span:
        before = self.render(messages[:turn], tools, prompt=True)
        if not text.startswith(before):
            raise NoSpans(
                f"the template writes what is before message {turn + 1} otherwise when the assistant is to answer than "
                f"in the whole chat: mark the assistant's text in it by {{% generation %}}"
            )
        start, stop = len(before), self._stop(text, messages, turn, tools)
        content = messages[turn].get("content")
        has_prompt = before != self.render(messages[:turn], tools)
        if not has_prompt and isinstance(content, str) and content.strip():
            place = text.find(content.strip(), start, stop)
            if place < 0 or text[start:place].strip():
                raise NoSpans(
                    f"the template has no prompt for the assistant (add_generation_prompt), and writes "
                    f"{text[start : place if place > start else start + 40]!r} before message {turn + 1}"
                )
        return start, stop

    def _stop(self, text: str, messages: Sequence[Message], turn: int, tools: Any) -> int:
        """Return the place at which a message ends if the chat goes on."""
        so_far, is_last = self.render(messages[: turn + 1], tools), turn + 1 == len(messages)
        longer = text
        if is_last:
            try:
                longer = self.render([*messages, {"role": "user", "content": "?"}], tools)
            except NoChat:
                return len(text)
        for beginning in (so_far, so_far.rstrip().removesuffix(self._end) if self._end else so_far):
            if longer.startswith(beginning):
                return len(beginning)
        if is_last:
            return len(text)
        raise NoSpans(
            f"the template writes message {turn + 1} otherwise when others follow (it may strip thoughts): set "
            f"train_on='last', or mark the assistant's text in it by {{% generation %}}"
        )


def read_template(folder: Path | None, template: str | os.PathLike[str] | None) -> tuple[str, dict[str, str]]:
    """Return the text of a template and the special tokens of a tokenizer's folder.

    Args:
        folder: the folder; it may have no special tokens. None: the tokenizer has none, it is bytes.
        template: the template as text, the path of a file with it, or None for the folder's.

    Raises:
        ValueError: if there is none.
    """
    config: dict[str, Any] = {}
    if folder and (folder / "tokenizer_config.json").is_file():
        config = json.loads((folder / "tokenizer_config.json").read_bytes())
    tokens = {name: config[name] for name in _SPECIAL if config.get(name)}
    special = {name: token["content"] if isinstance(token, dict) else token for name, token in tokens.items()}
    if template is not None:
        text = os.fspath(template)
        return (text if "{" in text else _read(user_path(text), text)), special
    if folder and (file := folder / "chat_template.jinja").is_file():
        return file.read_text(encoding="utf-8"), special
    own = config.get("chat_template")
    if isinstance(own, list):  # several by name
        own = next((entry["template"] for entry in own if entry.get("name") == "default"), None)
    if not isinstance(own, str):
        raise ValueError(
            f"Chat: {folder or 'bytes'} has no chat template (chat_template.jinja, chat_template in "
            f"tokenizer_config.json): set template to a file with one, or to its text"
        )
    return own, special


def _read(file: Path, named: str) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(
            f"Chat: template = {named!r}: {error.strerror} (looked from {os.getcwd()}); it is a path, or the text of a "
            f"template, which has braces"
        ) from None
