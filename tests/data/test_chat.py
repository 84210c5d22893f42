"""Chats: the assistant's tokens by public templates against spans marked by hand, and refusals, never all ones."""

from __future__ import annotations

import json
import pickle
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.chat_templates import (
    CHAT,
    CHATML,
    CHATML_TEXT,
    QWEN,
    TEMPLATES,
    THINKING,
    THINKING_TEXT,
    TOOL_CHAT,
    TOOL_TEXT,
    TOOLS,
)
from helpers.documents import write_rows
from helpers.hf_folders import LLAMA, make_folder
from helpers.tokenizer import TEXT

from colossus.config import load_config
from colossus.data.documents.chat import Chat
from colossus.data.documents.chat_template import ChatTemplate, NoChat, NoSpans
from colossus.data.documents.packed import NO_LABEL, Packed, make_documents
from colossus.data.tokenizer import load_tokenizer
from colossus.launch.checks import check_data

pytest.importorskip("transformers")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def marked(text: str, spans: Any) -> str:
    for start, stop in reversed(spans):
        text = f"{text[:start]}«{text[start:stop]}»{text[stop:]}"
    return text


def only_last(text: str) -> str:
    before, _, last = text.rpartition("«")
    return before.replace("«", "").replace("»", "") + "«" + last


@pytest.mark.parametrize("name", TEMPLATES)
def test_spans_are_those_marked_by_hand(name: str) -> None:
    written = TEMPLATES[name]
    template = ChatTemplate(written.template, written.special_tokens, {})
    assert marked(*template.spans(CHAT, None, "all")) == written.text
    assert marked(*template.spans(CHAT, None, "last")) == only_last(written.text)
    # without a system prompt, of one turn, and one that goes on behind the last answer
    whole = written.text.replace("«", "").replace("»", "")
    for chat in (CHAT[1:], CHAT[:3], [*CHAT, {"role": "user", "content": "And?"}]):
        text, spans = template.spans(chat, None, "all")
        assert [text[start:stop].strip() for start, stop in spans] == [
            span.strip() for span in re.findall("«(.*?)»", written.text, re.DOTALL)[: len(spans)]
        ]
        assert len(spans) == sum(message["role"] == "assistant" for message in chat)
        assert text.startswith(whole[:3]) or chat[0] != CHAT[0]


def test_thoughts_that_a_template_strips_are_refused_for_all_and_exact_for_the_last() -> None:
    template = ChatTemplate(QWEN, {"eos_token": "<|im_end|>"}, {})
    with pytest.raises(NoSpans, match=r"writes message 2 otherwise when others follow.*train_on='last'"):
        template.spans(THINKING, None, "all")
    assert marked(*template.spans(THINKING, None, "last")) == THINKING_TEXT
    plain = [{**message, "content": message["content"].split("\n\n")[-1]} for message in THINKING]
    assert marked(*template.spans(plain, None, "all")).count("«") == 2


def test_calls_of_tools_are_the_assistants_text() -> None:
    template = ChatTemplate(TOOLS, {}, {})
    chat = [{key: value for key, value in message.items() if value is not None} for message in TOOL_CHAT]
    assert marked(*template.spans(chat, [{"name": "add"}], "all")) == TOOL_TEXT


HEADER = """\
{% for message in messages %}{{ message['role'] + ': ' + message['content'] + eos_token }}{% endfor %}"""
THINKS_FIRST = CHATML.replace("assistant\n' }}{% endif", "assistant\n<think>\n' }}{% endif")
FEW_MARKS = CHATML.replace("{% for", "{% generation %}x{% endgeneration %}{% for", 1)


@pytest.mark.parametrize(
    ("template", "error", "message"),
    [
        (HEADER, NoSpans, r"no prompt for the assistant \(add_generation_prompt\), and writes 'assistant: '"),
        (THINKS_FIRST, NoSpans, "writes what is before message 3 otherwise"),
        (FEW_MARKS, NoSpans, "marks 1 spans of 2 messages"),
        ("{{ raise_exception('no') }}", NoChat, "the template refuses its messages: no"),
        ("{{ messages[0].content }}{% if add_generation_prompt %}A:{% endif %}", NoSpans, "is before message 3"),
        (CHATML.replace("message['content']", "(message['content'] if loop.index < 3 else '')"), None, ""),
    ],
)
def test_what_is_not_exact_is_refused(template: str, error: type[Exception] | None, message: str) -> None:
    made = ChatTemplate(template, {"eos_token": "</s>"}, {})
    if error is None:
        text, spans = made.spans(CHAT, None, "all")
        assert {text[start:stop] for start, stop in spans} == {"<|im_end|>"}
        return
    with pytest.raises(error, match=message):
        made.spans(CHAT, None, "all")


# -- tokens -----------------------------------------------------------------------------------------------------


def folder_of(tmp_path: Path, template: str | None, special_tokens: dict[str, Any], added: list[str]) -> Path:
    """The folder of a byte-level BPE with these special tokens."""
    tokenizers: Any = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator([TEXT, CHATML_TEXT] * 9, trainer)
    made.add_special_tokens(added)
    folder = tmp_path / "model"
    folder.mkdir(exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({**special_tokens, "chat_template": template}))
    return folder


def trained_text(documents: Any, number: int, decode: Any) -> str:
    """The text of a document with the trained tokens between guillemets."""
    within = slice(documents.offsets[number], documents.offsets[number + 1])
    ids, trained = documents.tokens[within], documents.trained[within]
    bounds = [0, *(np.flatnonzero(np.diff(trained)) + 1).tolist(), len(ids)]
    parts = [
        f"«{decode(ids[start:stop])}»" if trained[start] else decode(ids[start:stop])
        for start, stop in pairwise(bounds)
    ]
    return "".join(parts)


@pytest.mark.parametrize("name", TEMPLATES)
def test_tokens_of_the_spans_are_trained_on(tmp_path: Path, name: str) -> None:
    written = TEMPLATES[name]
    tokens = sorted({*re.findall(r"<[^ >]+>", written.text), *written.special_tokens.values()})
    special = {key: {"content": value} for key, value in written.special_tokens.items()}
    folder = folder_of(tmp_path, written.template, special, tokens)
    source = dict(type="Jsonl", path=write_rows(tmp_path / "x.jsonl", [{"messages": CHAT}]))
    encoder = Chat(source, tokenizer=folder)
    documents: Any = make_documents(encoder)
    text = trained_text(documents, 0, lambda ids: encoder.library().decode(ids.tolist(), skip_special_tokens=False))
    # a token may begin with the white space before a span, or end with that behind it
    assert re.sub(r"\s*([«»])\s*", r"\1", text) == re.sub(r"\s*([«»])\s*", r"\1", written.text)
    in_bytes: Any = make_documents(Chat(source, template=written.template, variables=written.special_tokens))
    assert trained_text(in_bytes, 0, lambda ids: bytes(ids.tolist()).decode()) == written.text


def test_labels_are_the_assistants_tokens_and_loss_is_nowhere_else(tmp_path: Path) -> None:
    rows = [{"messages": CHAT, "id": 1}, {"messages": [*CHAT[1:3]]}, {"messages": TOOL_CHAT[::3]}]
    source = dict(type="Jsonl", path=write_rows(tmp_path / "x.jsonl", rows))
    chats = dict(type="Chat", source=source, template=CHATML)
    packed = Packed(chats, 512, validation_fraction=0)
    batch = packed.batch(np.arange(len(packed)))
    labels = batch["labels"][batch["labels"] != NO_LABEL]
    assert len(packed) == 1
    answers = "Two.<|im_end|>", "Three.<|im_end|>", "Two.<|im_end|>", "It is 2.<|im_end|>"
    assert sorted(bytes(labels.tolist()).decode().split("<|im_end|>")) == sorted("".join(answers).split("<|im_end|>"))
    has_label = batch["labels"] != NO_LABEL
    assert batch["labels"][has_label].equal(batch["inputs"]["ids"].roll(-1, 1)[has_label])
    assert (
        pickle.loads(pickle.dumps(Chat(source, template=CHATML))).fingerprint
        == Chat(source, template=CHATML).fingerprint
    )
    with pytest.raises(ValueError, match=r"x\.jsonl, line 1: a document of \d+ tokens is longer than a row of 100"):
        Packed(chats, 100, validation_fraction=0)


def test_the_model_folders_tokenizer_and_template_are_those_of_chats(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    make_folder(tmp_path / "llama", dict(LLAMA, vocab_size=410, max_position_embeddings=128))
    folder_of(tmp_path, CHATML, {"eos_token": "<|im_end|>"}, ["<|im_start|>", "<|im_end|>"]).joinpath(
        "tokenizer.json"
    ).rename("llama/tokenizer.json")
    Path("model/tokenizer_config.json").rename("llama/tokenizer_config.json")
    write_rows(Path("x.jsonl"), [{"messages": CHAT}] * 40)
    chats = dict(type="Chat", source=dict(type="Jsonl", path="x.jsonl"))
    config = dict(model=dict(type="hf", path="llama"), data=dict(type="Packed", source=chats))
    config["train"] = dict(steps=1, global_batch_size=2)
    loaders = check_data(load_config(config))
    assert loaders is not None
    assert loaders.validation is not None
    assert loaders.tokenizer is not None
    decode = load_tokenizer(loaders.tokenizer.content, "").decode
    for batch in (next(loaders.train), *loaders.validation):
        answers = decode(batch["labels"][batch["labels"] != NO_LABEL].tolist(), skip_special_tokens=False)
        assert answers.replace("Two.<|im_end|>Three.<|im_end|>", "") == ""


BAD = [
    ([], "no message is of the assistant"),
    ("hello", "it is no list of messages"),
    ([{"from": "human", "value": "hi"}], "message 1 has the role None; roles are system, developer, user"),
    ([{"role": "user", "content": "hi"}], "no message is of the assistant"),
    ([{"role": "user", "content": "hi"}, {"role": "asistant", "content": "ho"}], "message 2 has the role 'asistant'"),
    ([{"role": "user"}, {"role": "assistant", "content": "ho"}], "the template refuses its messages"),
]


@pytest.mark.parametrize(("messages", "message"), BAD)
def test_rows_that_are_no_chats_are_told_by_line(tmp_path: Path, messages: Any, message: str) -> None:
    file = write_rows(tmp_path / "x.jsonl", [{"messages": CHAT}, {"messages": messages}])
    with pytest.raises(ValueError, match=rf"x\.jsonl, line 2: 'messages': {re.escape(message)}.*skip=\['chat'\]"):
        make_documents(Chat(dict(type="Jsonl", path=file), template=CHATML))
    documents: Any = make_documents(Chat(dict(type="Jsonl", path=file), template=CHATML, skip=["chat"]))
    assert (len(documents), documents.skipped) == (1, {"chat": 1})


def test_options_that_do_not_fit_are_told_in_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = dict(type="Jsonl", path=write_rows(tmp_path / "x.jsonl", [{"messages": CHAT}]))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bytes").mkdir()
    (tmp_path / "bytes" / "chat_template.jinja").write_text(CHATML)  # of another tokenizer than bytes
    with pytest.raises(ValueError, match="has no chat template"):
        Chat(source)
    with pytest.raises(ValueError, match=r"template = 'none\.jinja': No such file"):
        Chat(source, template="none.jinja")
    with pytest.raises(ValueError, match="train_on = 'first' is not one of 'all', 'last'"):
        Chat(source, template=CHATML, train_on="first")
    with pytest.raises(ValueError, match=r"line 1: 'messages': the template has no prompt.*skip=\['spans'\]"):
        make_documents(Chat(source, template=HEADER, variables={"eos_token": "</s>"}))
    with pytest.raises(ValueError, match="'chat' is missing; it has 'messages'"):
        make_documents(Chat(source, template=CHATML, key="chat"))
    folder = folder_of(tmp_path, None, {}, [])
    (folder / "chat_template.jinja").write_text(CHATML)
    assert Chat(source, tokenizer=folder).template.text == CHATML
    glued = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    with pytest.raises(ValueError, match=r"the token '.*' is in part of the assistant"):
        make_documents(Chat(dict(type="Jsonl", path=write_rows(tmp_path / "y.jsonl", [
            {"messages": [{"role": "user", "content": "the qu"}, {"role": "assistant", "content": "ick fox"}]}
        ])), template=glued, tokenizer=folder))  # fmt: skip
