"""The Python of the page "Tuning" runs as one script, on folders of Hugging Face that are made here."""

from __future__ import annotations

import itertools
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.hf_folders import GPT2, make_folder
from helpers.tokenizer import VOCABULARY, make_tokenizer

import colossus
from colossus import layers
from colossus.config import load_config

PAGE = Path(colossus.__file__).parent.parent / "docs" / "tuning.md"
TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}<|end|>\n{% endfor %}"
TEMPLATE += "{% if add_generation_prompt %}assistant: {% endif %}"


def blocks() -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)


def rollouts(folder: str) -> list[dict[str, Any]]:
    """What a server returns: texts of the folder's model with their log-probabilities, and a reward each."""
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    rows = []
    for number in range(8):
        prompt, completion = [number // 4, 7], [20 + number, 3 + number]
        logits = model(torch.tensor([prompt + completion])).logits[0].log_softmax(-1)
        log_probs = [logits[1, completion[0]].item(), logits[2, completion[1]].item()]
        rows.append(dict(prompt=prompt, completion=completion, log_probs=log_probs, reward=float(number % 3)))
    return rows


def test_the_python_of_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = make_folder(tmp_path / "models" / "gpt2", GPT2 | dict(vocab_size=VOCABULARY, n_positions=32))
    make_tokenizer(folder)
    (folder / "tokenizer_config.json").write_text(
        json.dumps(dict(tokenizer_class="PreTrainedTokenizerFast", eos_token="<|end|>", chat_template=TEMPLATE))
    )
    chat = [dict(role="user", content="the fox"), dict(role="assistant", content="the dog")]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(dict(messages=chat)) + "\n" for _ in range(40)))
    (tmp_path / "books").mkdir()
    (tmp_path / "books" / "one.txt").write_text("the quick brown fox jumps over the lazy dog.\n" * 200)
    scope: dict[str, Any] = dict(
        colossus=colossus, itertools=itertools, layers=layers, rollouts=rollouts, shutil=shutil, torch=torch,
        VOCABULARY=VOCABULARY,
    )  # fmt: skip
    for block in blocks():
        exec(block, scope)
    assert {path.name for path in (tmp_path / "models").iterdir()} == {"gpt2", "tuned", "policy"}


def test_the_references_of_the_page_are_understood() -> None:
    (block,) = [block for block in blocks() if block.startswith("reference = dict()")]
    for line in block.splitlines():
        wanted = eval(line.removeprefix("reference = ").split("#")[0])
        model = dict(type="GPT", objective=dict(type="dpo"), reference=wanted)
        assert load_config(dict(model=model)).model.options["reference"] == wanted
