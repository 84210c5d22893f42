"""Chats as documents: messages to token ids, and which of them the assistant wrote. No torch."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from colossus.data.documents.chat_template import (
    ROLES,
    TRAIN_ON,
    ChatTemplate,
    Message,
    NoChat,
    NoSpans,
    Span,
    read_template,
)
from colossus.data.documents.encoder import Encoded, Encoder
from colossus.data.documents.row_source import BadRow, Row


class Chat(Encoder):
    """The messages of each row, by a chat template; only tokens that the assistant wrote are trained on.

    These are found exactly, see `colossus.data.documents.chat_template`, or the row is refused (kind ``spans``).

    Args:
        source, tokenizer, skip: see `Encoder`.
        template: path or text of a template in Jinja; None: that of the tokenizer's folder.
        key: key of the messages in a row: a list of ``dict(role=.., content=..)``, perhaps with ``tool_calls`` and
            others that the template knows.
        tools_key: key of the descriptions of tools, a list or its JSON; a row need not have it.
        train_on: train on ``"all"`` messages of the assistant, or on the ``"last"``.
        variables: further variables of the template, such as ``dict(enable_thinking=False)``.
    """

    def __init__(
        self,
        source: Any,
        template: str | os.PathLike[str] | None = None,
        key: str = "messages",
        tools_key: str = "tools",
        train_on: str = "all",
        tokenizer: str | os.PathLike[str] | None = None,
        variables: Mapping[str, Any] | None = None,
        skip: Sequence[str] | bool = (),
    ) -> None:
        super().__init__(source, tokenizer, skip)
        if train_on not in TRAIN_ON:
            raise ValueError(f"Chat: train_on = {train_on!r} is not one of {', '.join(map(repr, TRAIN_ON))}")
        folder = self.tokenizer.path.parent if self.tokenizer.path else None
        text, special_tokens = read_template(folder, template)
        self.template = ChatTemplate(text, special_tokens, variables or {})
        self.key, self.tools_key, self.train_on = key, tools_key, train_on

    def options(self) -> tuple[object, ...]:
        variables = sorted(self.template.variables.items())
        return self.key, self.tools_key, self.train_on, self.template.text, variables

    def encode(self, rows: Sequence[Row]) -> list[Encoded | BadRow]:
        rendered = [self._rendered(row) for row in rows]
        texts = [entry[0] for entry in rendered if not isinstance(entry, BadRow)]
        tokens = iter(self.tokenize(texts))
        return [entry if isinstance(entry, BadRow) else _encoded(*entry, *next(tokens)) for entry in rendered]

    def _rendered(self, row: Row) -> tuple[str, list[Span]] | BadRow:
        if self.key not in row:
            return BadRow("missing", f"{self.key!r} is missing; it has {', '.join(map(repr, row))}")
        messages, tools = row[self.key], row.get(self.tools_key)
        if problem := _problem(messages):
            return BadRow("chat", f"{self.key!r}: {problem}")
        # tables have an entry for what any message has
        messages = [{key: value for key, value in message.items() if value is not None} for message in messages]
        try:
            tools = json.loads(tools) if isinstance(tools, str) and tools else tools or None
            return self.template.spans(messages, tools, self.train_on)
        except NoSpans as error:
            return BadRow("spans", f"{self.key!r}: {error}")
        except (NoChat, json.JSONDecodeError) as error:
            return BadRow("chat", f"{self.key!r}: {error}")


def _problem(messages: Sequence[Message]) -> str:
    """Return why messages are no chat; empty if they are."""
    if not isinstance(messages, list) or not all(isinstance(message, Mapping) for message in messages):
        return "it is no list of messages, dict(role=.., content=..)"
    for number, message in enumerate(messages, start=1):
        if message.get("role") not in ROLES:
            return f"message {number} has the role {message.get('role')!r}; roles are {', '.join(ROLES)}"
    if all(message["role"] != "assistant" for message in messages):
        return "no message is of the assistant, so there is nothing to train on"
    return ""


def _encoded(text: str, spans: Sequence[Span], ids: np.ndarray, places: np.ndarray) -> Encoded | BadRow:
    """Return a chat with the tokens inside of spans marked; places [t, 2] are the characters of each token."""
    trained = np.zeros(len(ids), bool)
    starts, stops = places[:, 0], places[:, 1]
    for start, stop in spans:
        inside = (stops > start) & (starts < stop)
        for token in np.flatnonzero(inside & ((starts < start) | (stops > stop))).tolist():
            over = text[starts[token] : start] + text[stop : stops[token]]
            if over.strip():
                return BadRow(
                    "spans",
                    f"the token {text[starts[token] : stops[token]]!r} is in part of the assistant: the template needs "
                    f"a special token, or white space, between messages",
                )
        trained |= inside
    return Encoded(ids, trained)
