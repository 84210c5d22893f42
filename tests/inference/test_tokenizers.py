"""Tokens to text as they come: what was shown is never taken back, and together it is the whole text."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from colossus.checkpoint.manifest import MANIFEST, Manifest
from colossus.config import ConfigError
from colossus.inference.config import Source
from colossus.inference.generated_text import TextStream, byte_tokenizer, file_tokenizer, special_ids, tokenizer_of

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)
CORPUS = ["the quick brown fox, the lazy dog", "naïve café 你好 世界 😀😃 ünïcödé", "  two  spaces\n\tand tabs"]


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


def trained(kind: str) -> Any:
    """A small tokenizer: GPT-2's bytes, Llama's spaces as a letter with bytes for what is unknown, or words."""
    tokenizers = pytest.importorskip("tokenizers")
    models, decoders, pre, trainers = (
        tokenizers.models,
        tokenizers.decoders,
        tokenizers.pre_tokenizers,
        tokenizers.trainers,
    )
    if kind == "byte_level":
        made = tokenizers.Tokenizer(models.BPE())
        made.pre_tokenizer, made.decoder = pre.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=300,
            special_tokens=["<|endoftext|>"],
            initial_alphabet=pre.ByteLevel.alphabet(),
            show_progress=False,
        )
        made.train_from_iterator(CORPUS, trainer)
        return made
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    for letter in ["\u2581", *"abcdefghijklmnopqrstuvwxyz", "\u2581t", "\u2581th", "\u2581the"]:
        vocabulary[letter] = len(vocabulary)
    merges = [("\u2581", "t"), ("\u2581t", "h"), ("\u2581th", "e")]
    made = tokenizers.Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True))
    made.add_special_tokens(["<unk>", "<s>", "</s>"])
    made.pre_tokenizer = pre.Metaspace(prepend_scheme="first")
    made.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 1)]
    )
    return made


@pytest.fixture(scope="module", params=["byte_level", "metaspace"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(request.param)
    trained(request.param).save(str(path / "tokenizer.json"))
    return path


@given(st.lists(st.integers(0, 250), max_size=25))
def test_any_tokens_stream_to_what_they_decode_to(folder: Path, ids: list[int]) -> None:
    """Pieces of characters and invalid bytes, too. A decoder that shows a run of bytes as a whole takes letters back
    when an invalid one follows; what was shown stays."""
    tokenizer = file_tokenizer(folder / "tokenizer.json", {})
    whole, shown = tokenizer.decode(ids), told(TextStream(tokenizer.decode), ids)
    if "\ufffd" not in whole or "byte_level" in folder.name:
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


def source(folder: Path, tokenizer: str | None, *, saved: bool = False) -> Source:
    if saved:
        (folder / MANIFEST).touch()
    return Source(folder, Manifest(0, 0.0, {}, {}, {}, {}, {}, tokenizer=tokenizer))


def test_which_tokenizer_it_is(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="does not say how its text became tokens"):
        tokenizer_of(source(tmp_path, None), None)
    assert tokenizer_of(source(tmp_path, "bytes"), None).num_ids == 256
    assert tokenizer_of(source(folder, "tokenizer.json"), None).num_ids != 256
    for given_path in (folder, folder / "tokenizer.json"):
        assert tokenizer_of(source(tmp_path, "bytes"), str(given_path)).num_ids != 256
    with pytest.raises(ConfigError, match=r"--tokenizer: .*No such file.*gone"):
        tokenizer_of(source(tmp_path, None), str(tmp_path / "gone"))
    with pytest.raises(ConfigError, match=r"No such file.*tokenizer\.json"):
        tokenizer_of(source(tmp_path, "tokenizer.json"), None)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"cannot be read.*--tokens 1,2,3"):
        tokenizer_of(source(tmp_path, "tokenizer.json"), None)
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ConfigError, match=r"pip install colossus\[hf\]"):
        tokenizer_of(source(folder, "tokenizer.json"), None)
