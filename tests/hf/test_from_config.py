"""``model = dict(type="hf", path=..)``: once a config is loaded it holds the model that is meant."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from helpers.hf_folders import GPT2, LLAMA, QWEN3_MOE, VIT, make_folder, random_tensors
from helpers.tokenizer import TEXT, VOCABULARY, make_tokenizer

from colossus.cli.main import main
from colossus.config import ConfigError, as_dict, load_config
from colossus.config.section import Named
from colossus.data import TextFolder
from colossus.launch.checks import check_data


def _config(**model: Any) -> dict[str, Any]:
    return dict(model=model, train=dict(steps=1, global_batch_size=2), device="cpu")


def test_a_config_holds_the_model_that_is_meant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    make_folder(tmp_path / "llama", LLAMA)
    found = as_dict(load_config(_config(type="hf", path="llama", attention_dropout=0.25, seq_len=5)))
    assert found["model"]["type"] == "Llama"
    assert (found["model"]["hidden_size"], found["model"]["seq_len"]) == (8, 5)
    assert found["model"]["attention_dropout"] == 0.25
    assert "path" not in found["model"]
    assert found["checkpoint"]["weights"]["path"] == "llama"
    fresh = load_config(_config(type="hf", path="llama", weights=False))
    assert fresh.checkpoint.weights is None
    other = load_config({**_config(type="hf", path="llama"), "checkpoint": dict(weights="elsewhere")})
    assert other.checkpoint.weights is not None
    assert other.checkpoint.weights.path == "elsewhere"
    make_folder(tmp_path / "experts", QWEN3_MOE)
    tuned = load_config(_config(type="hf", path="experts", experts=dict(aux_loss=0.5)))
    assert tuned.model is not None
    assert tuned.model.options["experts"] == dict(
        num=3, top_k=2, ffn_size=5, norm_topk=False, every=2, aux_loss=0.5, shared=None, score="softmax",
        scale=1.0, groups=None, top_groups=None, first_dense=0, bias_update=None, capacity=None, bias=False, limit=None,
    )  # fmt: skip
    over = load_config(_config(type="hf", path="llama"), ["model.activation_checkpoint=full"])
    assert over.model is not None
    assert over.model.options["activation_checkpoint"] == "full"


def test_its_text_is_read_by_its_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where data is text and names none, that of validation too; whatever the weights."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    make_folder(tmp_path / "gpt2", dict(GPT2, vocab_size=VOCABULARY))
    (tmp_path / "a.txt").write_text(TEXT * 50)
    other = make_tokenizer(tmp_path / "other")

    def data_of(data: Any, **model: Any) -> Any:
        found = load_config({**_config(type="hf", path="gpt2", **model), "data": data}).data
        return found.spec() if isinstance(found, Named) else found

    texts = dict(type="TextFolder", path=".")
    assert "tokenizer" not in data_of(texts)
    make_tokenizer(tmp_path / "gpt2")
    for model in (dict(), dict(weights=False)):
        assert data_of(texts, **model)["tokenizer"] == "gpt2"
    assert data_of("PythonStdlib")["tokenizer"] == "gpt2"
    assert data_of(dict(type=TextFolder, path="."))["tokenizer"] == "gpt2"
    for given in ("bytes", str(other)):
        assert data_of({**texts, "tokenizer": given})["tokenizer"] == given
    assert data_of({**texts, "validation": dict(path="b")})["validation"] == dict(path="b")
    assert data_of({**texts, "validation": texts})["validation"]["tokenizer"] == "gpt2"
    assert data_of({**texts, "validation": "PythonStdlib"})["validation"]["tokenizer"] == "gpt2"
    for unchanged in (dict(type="TokenFile", path="ids.npy"), dict(type=lambda tokenizer=None: [])):
        assert "tokenizer" not in data_of(unchanged)
    assert data_of([1, 2]) == [1, 2]

    loaders = check_data(load_config({**_config(type="hf", path="gpt2"), "data": texts}))
    assert loaders is not None
    assert loaders.tokenizer is not None
    assert loaders.tokenizer.name == "tokenizer.json"
    assert loaders.description.count(", tokenizer gpt2/tokenizer.json (") == 2


CONFIG_REFUSED = [
    (
        dict(path="nowhere"),
        r"model: path = 'nowhere': there is no such folder, and colossus downloads nothing",
    ),
    (dict(path="empty"), r"model: path = 'empty': has no config.json with a model_type"),
    (dict(), r"model: needs the path of a model folder: .*got path = None"),
    (dict(path="llama", hiden_size=8), r"model.hiden_size: no such key; did you mean model.hidden_size\?"),
    (dict(path="llama", norm="layernorm"), r"model.norm"),
    (
        dict(path="experts", experts=dict(top_k=4)),
        r"model.experts: top_k = 4 experts of a token, but num = 3 of a layer",
    ),
    (dict(path="mamba"), r"model: mamba/config.json: model_type = 'mamba': colossus reads .*gpt2, .*llama, .*vit"),
]


@pytest.mark.parametrize(("model", "said"), CONFIG_REFUSED)
def test_what_a_config_says_wrong(
    model: dict[str, Any], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    make_folder(tmp_path / "llama", LLAMA)
    make_folder(tmp_path / "experts", QWEN3_MOE)
    (tmp_path / "empty").mkdir()
    (tmp_path / "mamba").mkdir()
    (tmp_path / "mamba" / "config.json").write_text('{"model_type": "mamba"}')
    with pytest.raises(ConfigError, match=said):
        load_config(_config(type="hf", **model))


def test_weights_that_do_not_fit_are_told_before_a_process_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the rules of the ranks, of which the command line may choose others; the path is the model's."""
    monkeypatch.chdir(tmp_path)
    vit = dict(VIT, num_channels=1)
    make_folder(tmp_path / "vit", vit, {k: v for k, v in random_tensors(vit).items() if not k.startswith("classifier")})
    make_folder(tmp_path / "gpt2", dict(GPT2, vocab_size=256))
    for kind, more, data in (("vit", "num_classes=10", "Digits"), ("gpt2", "seq_len=4", "PythonStdlib")):
        text = f'model = dict(type="hf", path="{kind}", {more})\ndata = dict(type="{data}")\ndevice = "cpu"\n'
        (tmp_path / f"{kind}.py").write_text(text + "train = dict(steps=1, global_batch_size=2)\n")
    dry = ("launch", "--dry-run")
    assert main([*dry, "vit.py"]) == 2
    told = capsys.readouterr().err
    assert "checkpoint.weights = 'vit': it does not fit the model: 2 missing there: head.bias, head.weight" in told
    found = load_config("vit.py", ["checkpoint.weights.strict=False"])
    assert found.checkpoint.weights is not None
    assert (found.checkpoint.weights.path, found.checkpoint.weights.strict) == ("vit", False)
    assert main([*dry, "vit.py", "checkpoint.weights.strict=False"]) == 0
    assert main([*dry, "gpt2.py"]) == 0
    assert main([*dry, "gpt2.py", "model.hidden_size=16"]) == 2
    assert "20 of another shape: embedding.weight (256, 8) there, (256, 16) here" in capsys.readouterr().err
    with pytest.raises(ConfigError, match=r"checkpoint\.weights\.path: is missing; only model = dict\(type=\"hf\""):
        load_config("gpt2.py", ["model.weights=False", "checkpoint.weights.strict=False"])
