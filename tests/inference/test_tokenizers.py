"""Tokens to text as they come: what was shown is never taken back, and together it is the whole text."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers.tokenizer import make_tokenizer
from hypothesis import given
from hypothesis import strategies as st

from colossus.checkpoint.manifest import MANIFEST, Manifest
from colossus.config import ConfigError
from colossus.inference.config import WeightSource
from colossus.inference.generated_text import TextStream, byte_tokenizer, file_tokenizer, special_ids, tokenizer_of

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)


def told(stream: Any, tokens: Any) -> str:
    return "".join([*(stream.push(token) for token in tokens), stream.finish()])


@given(st.binary(max_size=40))
def test_bytes_are_decoded_as_python_does(data: bytes) -> None:
    assert told(TextStream(byte_tokenizer().decode), data) == data.decode(errors="replace")


@given(TEXTS)
def test_a_character_comes_when_it_is_whole(text: str) -> None:
    stream, shown = TextStream(byte_tokenizer().decode), ""
    for letter in text:
        *first, last = letter.encode()
        assert [stream.push(byte) for byte in first] == [""] * len(first)
        shown += stream.push(last)
        assert text.startswith(shown)
        assert letter == "\ufffd" or shown[-1] == letter
    assert shown + stream.finish() == text


# -- tokenizer.json ---------------------------------------------------------------------------------------


def make_metaspace(folder: Path) -> None:
    """Llama's: spaces as a letter, bytes for what is unknown, a token before each text."""
    tokenizers = pytest.importorskip("tokenizers")
    decoders = tokenizers.decoders
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    for letter in ["\u2581", *"abcdefghijklmnopqrstuvwxyz", "\u2581t", "\u2581th", "\u2581the"]:
        vocabulary[letter] = len(vocabulary)
    merges = [("\u2581", "t"), ("\u2581t", "h"), ("\u2581th", "e")]
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True))
    made.add_special_tokens(["<unk>", "<s>", "</s>"])
    made.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(prepend_scheme="first")
    made.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    made.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    made.save(str(folder / "tokenizer.json"))


@pytest.fixture(scope="module", params=[make_tokenizer, make_metaspace], ids=["byte_level", "metaspace"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(request.param.__name__)
    request.param(path)
    return path


@given(st.lists(st.integers(0, 250), max_size=25))
def test_any_tokens_stream_to_what_they_decode_to(folder: Path, ids: list[int]) -> None:
    """Pieces of characters and invalid bytes, too. A decoder that shows a run of bytes as a whole takes letters back
    when an invalid one follows; what was shown stays."""
    tokenizer = file_tokenizer(folder / "tokenizer.json", {})
    whole, shown = tokenizer.decode(ids), told(TextStream(tokenizer.decode), ids)
    if "\ufffd" not in whole or "make_tokenizer" in folder.name:
        assert shown == whole
    else:
        assert "\ufffd" in shown


@given(TEXTS, st.integers(0, 20))
def test_text_streams_on_behind_a_prompt(folder: Path, text: str, cut: int) -> None:
    """The space before the first word, too, which Llama's decoder takes where a text begins."""
    tokenizer = file_tokenizer(folder / "tokenizer.json", {})
    for whole in (f"the {text}", f"of the\U0001f9ff\U0001f9ff{text} the"):
        ids = tokenizer.encode(whole)
        shown = [tokenizer.decode(ids[:at]) for at in range(len(ids) + 1)]
        at = next((at for at in range(min(cut, len(ids) - 1), 0, -1) if "\ufffd" not in shown[at]), 0)
        assert shown[at] + told(TextStream(tokenizer.decode, ids[:at]), ids[at:]) == shown[-1]


def test_what_begins_and_ends_a_text_is_what_the_files_say(folder: Path, tmp_path: Path) -> None:
    """Of the model where no file does; an empty prompt begins with the token for that."""
    file = tmp_path / "tokenizer.json"
    file.write_bytes((folder / "tokenizer.json").read_bytes())
    is_plain = file_tokenizer(file, {}, adds_special=False)
    assert (is_plain.stop, is_plain.encode("")) == ((), [])
    ids = {"eos_token_id": 4, "bos_token_id": 3}
    assert file_tokenizer(file, ids, adds_special=False).encode("") == [3]
    assert file_tokenizer(file, ids).stop == (4,)
    (tmp_path / "config.json").write_text(json.dumps(dict(eos_token_id=7)))
    assert file_tokenizer(file, ids).stop == (7,)
    (tmp_path / "generation_config.json").write_text(json.dumps(dict(eos_token_id=[5, 6, None], bos_token_id=None)))
    assert file_tokenizer(file, {}).stop == special_ids(tmp_path, {}, "eos_token_id") == (5, 6)


def source(folder: Path, tokenizer: str | None, *, saved: bool = False) -> WeightSource:
    if saved:
        (folder / MANIFEST).touch()
    return WeightSource(folder, Manifest(0, 0.0, {}, {}, {}, {}, {}, tokenizer=tokenizer))


def test_which_tokenizer_it_is(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="records no tokenizer"):
        tokenizer_of(source(tmp_path, None), None)
    assert tokenizer_of(source(tmp_path, "bytes"), None).num_ids == 256
    assert tokenizer_of(source(folder, "tokenizer.json"), None).num_ids != 256
    for given_path in (folder, folder / "tokenizer.json"):
        assert tokenizer_of(source(tmp_path, "bytes"), str(given_path)).num_ids != 256
    with pytest.raises(ConfigError, match=r"--tokenizer: .*No such file.*gone"):
        tokenizer_of(source(tmp_path, None), str(tmp_path / "gone"))
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ConfigError, match=r"pip install colossus\[hf\]"):
        tokenizer_of(source(folder, "tokenizer.json"), None)
