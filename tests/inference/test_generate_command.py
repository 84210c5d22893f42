"""``colossus generate``: what it prints where, how it ends, what it refuses before anything starts."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers.inference import MODELS, save
from helpers.launching import children, finish, is_running, start, wait_for

from colossus.checkpoint.manifest import MANIFEST
from colossus.cli.main import main
from colossus.config import load_config
from colossus.inference import find_source, generate, load_model, ranks
from colossus.inference.config import WeightSource

TEXT = dict(type="GPT", num_layers=1, hidden_size=16, num_heads=2, vocab_size=259, seq_len=40)
ROTARY = {**TEXT, "positions": "rotary"}


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> WeightSource:
    return save(tmp_path_factory.mktemp("texts"), TEXT)


@pytest.fixture(scope="module")
def rotary(tmp_path_factory: pytest.TempPathFactory) -> WeightSource:
    return save(tmp_path_factory.mktemp("rotary"), ROTARY, precision="fp32")


Captured = pytest.CaptureFixture[str]


def run(capfd: Captured, *words: str) -> tuple[int, str, str]:
    code = main(["generate", *words])
    out, err = capfd.readouterr()
    return code, out, err


def data(capfd: Captured, *words: str) -> dict[str, Any]:
    code, out, err = run(capfd, *words, "--json")
    assert code == 0, err
    found: dict[str, Any] = json.loads(out)
    return found


def test_one_prompt_is_printed_with_its_text(texts: WeightSource, capfd: Captured) -> None:
    folder = str(texts.folder.parent)
    code, out, err = run(capfd, folder, "--prompt", "déf", "--tokenizer", "bytes", "--max-tokens", "20", "--seed", "3")
    assert code == 0
    found = data(capfd, folder, "--prompt", "déf", "--tokenizer", "bytes", "--max-tokens", "20", "--seed", "3")
    (result,) = found["results"]
    assert out.rstrip("\n") == ("déf" + result["text"]).rstrip("\n")
    assert out.endswith("\n")
    assert bytes(result["tokens"]).decode(errors="replace") == result["text"]
    assert max(result["tokens"]) < 256, "an id that is no byte"
    assert result["prompt_tokens"] == list("déf".encode())
    assert (len(result["tokens"]), result["ended"]) == (20, "max_tokens")
    assert found["plan"] == "one process, fp64"
    assert found["tokens_per_second"] > 0
    first, last = err.splitlines()
    assert first == f"colossus: {texts.folder}, step 0: one process, fp64"
    assert re.fullmatch(r"colossus: [\d.]+ tokens/s", last)
    _, _, err = run(capfd, folder, "--tokenizer", "bytes", "--prompt", "abcd")
    assert "prompt 1 stopped at the last position that the model has learned" in err


def test_several_prompts_come_whole(texts: WeightSource, capfd: Captured) -> None:
    """On ranks of their own, with a batch that is repeated until it divides: the same text."""
    folder, words = (
        str(texts.folder),
        ["--tokenizer", "bytes", "--max-tokens", "6", "--prompt", "abc", "--prompt", "x\n"],
    )
    code, out, _ = run(capfd, folder, *words)
    assert code == 0
    results = data(capfd, folder, *words)["results"]
    ends = ["" if (each["prompt"] + each["text"]).endswith("\n") else "\n" for each in results]
    wanted = [
        f"--- prompt {at + 1} of 2 ---\n{each['prompt']}{each['text']}{ends[at]}" for at, each in enumerate(results)
    ]
    assert out == "\n".join(wanted)
    for plan in (["parallel.tensor=dict(mode='2d',size=4)"], ["parallel.data=2"]):
        assert run(capfd, folder, *plan, *words)[:2] == (0, out)
    assert "data 2, fp64" in run(capfd, folder, "parallel.data=2", *words)[2]


def test_numbers_in_and_numbers_out(texts: WeightSource, capfd: Captured) -> None:
    folder = str(texts.folder)
    code, out, _ = run(capfd, folder, "--tokens", "258,0,7", "--max-tokens", "5", "--greedy")
    assert code == 0
    assert out.startswith("258,0,7,")
    numbers = [int(each) for each in out.split(",")]
    assert len(numbers) == 8
    found = data(capfd, folder, "--tokens", "258,0,7", "--max-tokens", "5", "--greedy")["results"][0]
    assert found["tokens"] == numbers[3:]
    assert (found["text"], found["prompt"]) == (None, None)


def test_standard_input_is_the_prompt(texts: WeightSource, capfd: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    for words in ([], ["--prompt", "-"]):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"two\nlines\xff\n")))
        found = data(capfd, str(texts.folder), "--tokenizer", "bytes", "--max-tokens", "1", *words)
        assert bytes(found["results"][0]["prompt_tokens"]) == b"two\nlines\xff"


REFUSED: dict[str, tuple[list[str], str]] = {
    "sequence": (["parallel.sequence=2"], "parallel.sequence = 2 splits tokens"),
    "heads": (["parallel.tensor=4"], "model.num_heads = 2"),
    "temperature": (["--temperature", "0"], "temperature = 0.0"),
    "both": (["--tokens", "1"], "--prompt and --tokens"),
    "tokenizer": (["--tokenizer", "nowhere"], "--tokenizer: [Errno 2] No such file or directory: 'nowhere'"),
    "long": (["--prompt", "x" * 41], "prompt 2 has 41 tokens, the model has learned 40 positions"),
}


@pytest.mark.parametrize("name", list(REFUSED))
def test_what_is_refused_before_a_process_starts(
    name: str, texts: WeightSource, capfd: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks, "on_ranks", None)
    words, message = REFUSED[name]
    code, out, err = run(capfd, str(texts.folder), "--prompt", "a", "--tokenizer", "bytes", *words)
    assert (code, out) == (2, "")
    assert message in err


def test_refused_prompts_and_checkpoints(texts: WeightSource, tmp_path: Path, capfd: Captured) -> None:
    folder = str(texts.folder)
    vit = dict(type="ViT", image_size=8, patch_size=4, num_layers=1, hidden_size=16, num_heads=2, num_classes=3)
    images = str(save(tmp_path / "images", vit).folder)
    for words, message in (
        ((str(tmp_path / "gone"), "--prompt", "a"), "there is no such folder"),
        ((folder, "--tokens", "5,259"), "has the token 259, the model has the tokens 0..258"),
        ((folder, "--tokens", "5,x"), "must be token ids with commas"),
        ((images, "--tokens", "1"), "model 'ViT' predicts no next token: generate takes a language model (GPT, .."),
    ):
        code, _, err = run(capfd, *words)
        assert (code, message in err) == (2, True), err


def test_a_damaged_checkpoint_gives_no_text(tmp_path: Path, capfd: Captured) -> None:
    source = save(tmp_path / "all", TEXT)
    (file,) = source.folder.glob("*.safetensors")
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    file.write_bytes(content)
    for plan in ([], ["parallel.pipeline=2"]):
        code, out, err = run(capfd, str(source.folder), *plan, "--tokens", "1")
        assert (code, out) == (1, "")
        assert file.name in err
        assert "take another checkpoint" in err
    (source.folder / MANIFEST).write_bytes(b"{")
    assert run(capfd, str(source.folder), "--tokens", "1")[0] == 1


OWN = """
from torch import nn
from colossus import layers


class Own(nn.Module):
    key_value_cache = {says}

    def __init__(self):
        super().__init__()
        self.embedding = layers.Embedding(61, 16)
        self.block = layers.TransformerBlock(16, 2, rotary=True)
        self.head = layers.LMHead(16, 61)

    def forward(self, ids):
        return self.head(self.block(self.embedding(ids)))

    def loss(self, logits, batch):
        return layers.cross_entropy(logits, batch["labels"])


model = dict(type=Own)
"""


def test_a_model_of_ones_own_is_cached_where_it_says_so(tmp_path: Path, capfd: Captured) -> None:
    """The same text, with a cache, without one, and on two ranks."""
    texts = []
    for says in (True, False):
        file = tmp_path / f"{says}.py"
        file.write_text(OWN.replace("{says}", str(says)))
        source = save(tmp_path / str(says), load_config(str(file)).model.spec())  # type: ignore[union-attr]
        words = [str(source.folder), "--tokens", "1,2,3", "--max-tokens", "6"]
        code, _, err = run(capfd, *words)
        assert code == 2
        assert "none of colossus" in err
        assert "pass --config FILE" in err
        for plan in ([], ["parallel.tensor=2"]):
            code, out, err = run(capfd, *words, *plan, "--config", str(file))
            assert code == 0, err
            texts.append(out)
    assert len(set(texts)) == 1


LOOP = ["--tokenizer", "bytes", "--prompt", "abc", "--max-tokens", "1000000"]


@pytest.mark.parametrize("plan", [[], ["parallel.tensor=2"]], ids=["one", "1d"])
def test_ctrl_c_ends_cleanly(rotary: WeightSource, tmp_path: Path, plan: list[str]) -> None:
    words = [sys.executable, "-m", "colossus", "generate", str(rotary.folder), *plan, *LOOP]
    process = start(words, tmp_path)
    wait_for(lambda: len(process.outputs[0]) > 20, process.pid)  # type: ignore[union-attr]
    ranks = children(process.pid)
    process.send_signal(signal.SIGINT)
    for rank in ranks:
        os.kill(rank, signal.SIGINT)  # as a terminal does
    code, out, err = finish(process)
    assert code == 130
    assert out.startswith("abc")
    assert out.endswith("\n")
    assert "Traceback" not in err
    assert err.splitlines()[-1] == "colossus: stopped by Ctrl-C"
    assert " tokens/s" in err.splitlines()[-2]
    assert len(ranks) == (2 if plan else 0)
    assert not any(map(is_running, ranks))


def test_ranks_end_with_what_has_started_them(rotary: WeightSource, tmp_path: Path) -> None:
    words = [sys.executable, "-m", "colossus", "generate", str(rotary.folder), "parallel.tensor=2", *LOOP]
    process = start(words, tmp_path)
    wait_for(lambda: len(process.outputs[0]) > 20, process.pid)  # type: ignore[union-attr]
    ranks = children(process.pid)
    process.kill()
    wait_for(lambda: not any(map(is_running, ranks)), *ranks)


def test_a_reader_that_goes_leaves_an_exit_code_and_no_traceback(rotary: WeightSource, tmp_path: Path) -> None:
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:  # a process whose standard output nobody reads
        os.dup2(write, 1)
        os.dup2(os.open(str(tmp_path / "err"), os.O_CREAT | os.O_WRONLY), 2)
        os.close(read)
        sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)
        code = main(["generate", str(rotary.folder), "parallel.pipeline=2", *LOOP])
        sys.stderr.flush()
        os._exit(code)
    os.close(write)
    assert os.read(read, 8).startswith(b"abc")
    os.close(read)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 128 + signal.SIGPIPE
    assert "Traceback" not in (tmp_path / "err").read_text()


def test_a_folder_of_hugging_face_continues_its_text(tmp_path: Path, capfd: Captured) -> None:
    """Written from a checkpoint: the same tokens, up to the one that its config says ends a text."""
    others = ("attention_pattern", "rotary_base_local", "sinks", "soft_cap", "attention_scale", "rotary_fraction")
    of_mistral = {key: value for key, value in MODELS["llama"].items() if key not in (*others, "logit_cap")}
    source = save(tmp_path / "ours", of_mistral)
    model = load_model(source)
    (whole,) = generate(model, [[5, 7, 9]], max_tokens=9)
    model.close()
    assert main(["checkpoint", "convert", str(source.folder), str(tmp_path / "theirs"), "--to", "hf"]) == 0
    capfd.readouterr()
    theirs = find_source(tmp_path / "theirs")
    assert theirs.is_foreign
    words = [str(theirs.folder), "--tokens", "5,7,9", "--max-tokens", "9"]
    for plan in ([], ["parallel.tensor=2"]):
        found = data(capfd, *words, *plan)
        assert found["results"][0]["tokens"] == whole
        assert found["plan"].endswith("fp64"), "the dtype of its tensors"
    config = json.loads((theirs.folder / "config.json").read_text())
    (theirs.folder / "config.json").write_text(json.dumps({**config, "eos_token_id": [whole[4], 60]}))
    (result,) = data(capfd, *words)["results"]
    end = min(whole.index(each) for each in (whole[4], 60) if each in whole)
    assert (result["tokens"], result["ended"]) == (whole[: end + 1], "stop")
    code, _, err = run(capfd, str(theirs.folder), "--prompt", "a")
    assert code == 2
    assert "records no tokenizer" in err
