"""``colossus generate``: what it prints where, how it ends, what it refuses before anything starts."""

from __future__ import annotations

import io
import itertools
import json
import math
import os
import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.inference import MODELS, save
from helpers.launching import children, finish, is_running, start, wait_for

from colossus.checkpoint.manifest import MANIFEST
from colossus.cli.main import main
from colossus.inference.output import Texts, harmless
from colossus.inference.source import Source
from colossus.inference.tokenizers import ByteTokenizer

TEXT = dict(type="GPT", num_layers=1, hidden_size=16, num_heads=2, vocab_size=259, seq_len=40)
ROTARY = {**TEXT, "positions": "rotary"}


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Source:
    return save(tmp_path_factory.mktemp("texts"), TEXT)


@pytest.fixture(scope="module")
def rotary(tmp_path_factory: pytest.TempPathFactory) -> Source:
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


def test_one_prompt_is_printed_with_its_text(texts: Source, capfd: Captured) -> None:
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
    assert found["decode_tokens_per_second"] > 0
    first, last = err.splitlines()
    assert first == f"colossus: {texts.folder}: GPT, step 0, one process, fp64"
    assert last.startswith("colossus: prefill: 4 tokens, ")
    assert "; decode: 19 tokens, " in last


def test_several_prompts_come_whole(texts: Source, capfd: Captured) -> None:
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


def test_numbers_in_and_numbers_out(texts: Source, capfd: Captured) -> None:
    folder = str(texts.folder)
    code, out, _ = run(capfd, folder, "--tokens", "258,0,7", "--max-tokens", "5", "--greedy")
    assert code == 0
    assert out.startswith("258,0,7,")
    numbers = [int(each) for each in out.split(",")]
    assert len(numbers) == 8
    found = data(capfd, folder, "--tokens", "258,0,7", "--max-tokens", "5", "--greedy")["results"][0]
    assert found["tokens"] == numbers[3:]
    assert (found["text"], found["prompt"]) == (None, None)


@pytest.mark.parametrize("words", [[], ["--prompt", "-"]], ids=["none", "dash"])
def test_standard_input_is_the_prompt(
    texts: Source, capfd: Captured, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"two\nlines\xff\n")))
    found = data(capfd, str(texts.folder), "--tokenizer", "bytes", "--max-tokens", "1", *words)
    assert bytes(found["results"][0]["prompt_tokens"]) == b"two\nlines\xff"


def test_it_stops_in_words_where_positions_end(texts: Source, rotary: Source, capfd: Captured) -> None:
    words = ["--tokenizer", "bytes", "--prompt", "abcd"]
    found = data(capfd, str(texts.folder), *words)
    assert found["results"][0]["ended"] == "positions"
    assert len(found["results"][0]["tokens"]) == 37
    _, _, err = run(capfd, str(texts.folder), *words)
    assert "stopped after 37 tokens: the model has learned 40 positions (model.seq_len)" in err
    code, _, err = run(capfd, str(rotary.folder), *words, "--max-tokens", "60")
    assert code == 0
    assert "warning: up to 64 tokens, but the model was trained on sequences of 40" in err
    assert "warning" not in run(capfd, str(rotary.folder), *words, "--max-tokens", "36")[2]


def test_precision_is_that_of_the_run_unless_told(rotary: Source, capfd: Captured) -> None:
    words = [str(rotary.folder), "--tokens", "1,2", "--max-tokens", "3"]
    assert data(capfd, *words)["plan"] == "one process, fp32"
    assert data(capfd, *words, "train.precision=bf16")["plan"] == "one process, bf16"


REFUSED: dict[str, tuple[list[str], str]] = {
    "sequence": (["parallel.sequence=2"], "parallel.sequence = 2 splits the tokens of a sequence"),
    "zero": (["parallel.zero=3"], "parallel.zero = 3 shards what training needs"),
    "sequence_sharded": (["parallel.tensor=dict(size=2,sequence_sharded=True)"], "splits the tokens between blocks"),
    "steps": (["train.steps=3"], "train.steps=3: generate trains nothing"),
    "heads": (["parallel.tensor=4"], "model.num_heads = 2"),
    "no value": (["parallel.tensor"], "'parallel.tensor' has no '=': overrides are section.key=value, and a prompt"),
    "no option": (
        ["x = def "],
        "'x = def ' is no override: overrides are section.key=value, and a prompt is given as --",
    ),
    "temperature": (["--temperature", "0"], "temperature = 0.0"),
    "top_k": (["--top-k", "0"], "top_k = 0"),
    "top_p": (["--top-p", "1.5"], "top_p = 1.5"),
    "max_tokens": (["--max-tokens", "0"], "must be a whole number of at least 1"),
    "both": (["--tokens", "1"], "--prompt and --tokens"),
    "tokenizer": (["--tokenizer", "nowhere"], "--tokenizer nowhere: there is no file"),
    "long": (["--prompt", "x" * 41], "prompt 2 has 41 tokens, but the model has learned 40 positions"),
    "empty": (["--prompt", ""], "the prompt is empty, and text as bytes has no token that begins one"),
}


@pytest.mark.parametrize("name", list(REFUSED))
def test_what_is_refused_before_a_process_starts(
    name: str, texts: Source, capfd: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    from colossus.inference import ranks

    monkeypatch.setattr(ranks, "Ranks", None)
    words, message = REFUSED[name]
    code, out, err = run(capfd, str(texts.folder), "--prompt", "a", "--tokenizer", "bytes", *words)
    assert (code, out) == (2, "")
    assert message in err


def test_refused_prompts_and_checkpoints(
    texts: Source, tmp_path: Path, capfd: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = str(texts.folder)
    code, _, err = run(capfd, str(tmp_path / "gone"), "--prompt", "a")
    assert code == 2
    assert "there is no such folder" in err
    if texts.tokenizer is None:
        code, _, err = run(capfd, folder, "--prompt", "a")
        assert code == 2
        assert "does not say how its text became tokens: give --tokenizer bytes" in err
    code, _, err = run(capfd, folder, "--tokens", "5,259")
    assert code == 2
    assert "has the token 259, but the model has the tokens 0..258" in err
    assert run(capfd, folder, "--tokens", "5,x")[0] == 2
    monkeypatch.setenv("RANK", "0")
    for name in ("WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "1")
    code, _, err = run(capfd, folder, "--tokens", "5")
    assert code == 2
    assert "run it by itself, without torchrun" in err


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


def test_a_model_that_gives_no_text_is_refused(
    tmp_path: Path, capfd: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    vit = dict(type="ViT", image_size=8, patch_size=4, num_layers=1, hidden_size=16, num_heads=2, num_classes=3)
    source = save(tmp_path, vit)
    code, _, err = run(capfd, str(source.folder), "--tokens", "1")
    assert code == 2
    assert "model 'ViT' gives no next token: generate takes a language model (GPT, Llama" in err


OWN = """
import torch
from torch import nn
from colossus import layers


class Own(nn.Module):
    key_value_cache = {says}

    def __init__(self, mixes):
        super().__init__()
        self.embedding = layers.Embedding(61, 16)
        self.block = layers.TransformerBlock(16, 2, rotary=True)
        self.mixes = mixes
        self.head = layers.LMHead(16, 61)

    def forward(self, ids):
        x = self.block(self.embedding(ids))
        if self.mixes:
            x = torch.cat([x[:, :12], x[:, 12:] + x[:, :-12] / 9], 1)
        return self.head(x)

    def loss(self, logits, batch):
        return layers.cross_entropy(logits, batch["labels"])


model = dict(type=Own, mixes={mixes})
"""


@pytest.mark.parametrize(
    ("says", "mixes", "precision", "why"),
    [
        (True, False, "fp64", ""),
        (True, False, "bf16", ""),
        (False, False, "fp64", "Own does not say that it can be continued from one"),
        (True, True, "bf16", "something but colossus.layers.Attention mixes tokens"),
    ],
    ids=["cached", "low", "unsaid", "wrong"],
)
def test_a_model_of_ones_own(
    says: bool, mixes: bool, precision: str, why: str, tmp_path: Path, capfd: Captured
) -> None:
    """What mixes tokens looks 12 back, and would hide in rounding to bf16: it is tried in float32."""
    from colossus.config import load_config
    from colossus.inference import Sampling, generate, load_model

    file = tmp_path / "own.py"
    file.write_text(OWN.replace("{mixes}", str(mixes)).replace("{says}", str(says)))
    kind = load_config(str(file)).model
    assert kind is not None
    source = save(tmp_path / "saved", kind.spec(), precision=precision)
    words = [str(source.folder), "--tokens", "1,2,3", "--max-tokens", "6"]
    code, _, err = run(capfd, *words)
    assert code == 2
    assert "its model is" in err
    assert "give --config FILE" in err
    texts = []
    for plan in ([], ["parallel.tensor=2"]):
        code, out, err = run(capfd, *words, *plan, "--config", str(file))
        assert code == 0, err
        assert ("whole sequences are computed for each token, without a cache" in err) == bool(why)
        assert why in err
        texts.append(out)
    assert texts[0] == texts[1]
    model = load_model(source, config_file=str(file))
    assert model.can_cache is not bool(why)
    assert model.module.get_parameter("head.weight").dtype == (torch.bfloat16 if precision == "bf16" else torch.float64)
    stored = {name: each.clone() for name, each in model.module.named_parameters()}
    with model.wide():
        assert not {each.dtype for each in model.module.parameters()} & {torch.bfloat16, torch.float16}
        logits = model.logits(torch.tensor([[1, 2, 3]]))
        assert logits is not None
        assert logits.dtype == (torch.float32 if precision == "bf16" else torch.float64)
    for name, each in model.module.named_parameters():
        assert each.dtype == stored[name].dtype
        assert torch.equal(each, stored[name])
    model.can_cache = False
    (slow,) = generate(model, [[1, 2, 3]], max_tokens=6, sampling=Sampling())
    assert texts[0].strip() == ",".join(map(str, [1, 2, 3, *slow]))
    model.close()


#: counts its positions by itself, of which it has 16; or fails by a fault of its own
ENDS = """
import torch
from torch import nn
from colossus import layers


class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = layers.Embedding(61, 16)
        self.positions = nn.Embedding(16, 16)
        self.head = layers.LMHead(16, 61)

    def forward(self, ids):
        {fault}
        return self.head(self.embedding(ids) + self.positions(torch.arange(ids.shape[1])))

    def loss(self, logits, batch):
        return layers.cross_entropy(logits, batch["labels"])


model = dict(type=Own)
"""


def test_a_model_that_fails_says_where(tmp_path: Path, capfd: Captured) -> None:
    from colossus.config import load_config

    file = tmp_path / "own.py"
    file.write_text(ENDS.replace("{fault}", ""))
    kind = load_config(str(file)).model
    assert kind is not None
    source = save(tmp_path / "saved", kind.spec())
    words = [str(source.folder), "--tokens", "1,2,3", "--max-tokens", "30", "--config", str(file)]
    for plan in ([], ["parallel.data=2"]):
        code, out, err = run(capfd, *words, *plan)
        assert code == 1
        assert out.count(",") == 16, "the 17th token is chosen behind 16, and fed to none"
        assert out.endswith("\n")
        assert "on 17 tokens, after 16 without a fault, the model raised IndexError: index out of range" in err
        assert "own.py" in err
        assert "Traceback" not in err
    code, out, err = run(capfd, *words, "--json")
    assert (code, len(json.loads(out)["results"][0]["tokens"])) == (1, 14)
    code, _, err = run(capfd, *words[:2], "1,61", *words[3:])
    assert (code, "prompt 0 has the token 61, but the model has the tokens 0..60" in err) == (2, True)
    file.write_text(ENDS.replace("{fault}", "int('seven')"))
    with pytest.raises(ValueError, match="invalid literal"):  # with its traceback, as Python prints it
        run(capfd, *words)


def test_logits_that_are_no_numbers_fail_in_one_line(tmp_path: Path, capfd: Captured) -> None:
    from colossus.inference import text_model

    source = save(tmp_path, TEXT)
    load = text_model._load

    def spoiled(found: Source, module: torch.nn.Module, context: Any) -> None:
        load(found, module, context)
        with torch.no_grad():
            module.get_parameter("norm.weight").fill_(float("nan"))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_model, "_load", spoiled)
        for plan in ([], ["parallel.tensor=2"]):
            code, out, err = run(capfd, str(source.folder), "--tokens", "1,2", *plan)
            assert (code, out) == (1, "1,2\n")
            assert err.splitlines()[-1].startswith("colossus: generate failed: the logits of row 0 behind 2 tokens")
            assert "Traceback" not in err


def test_closed_streams_are_told(texts: Source, capfd: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["generate", str(texts.folder), "--tokenizer", "bytes"]
    monkeypatch.setattr(sys, "stdin", None)
    assert main(words) == 2
    assert "standard input is closed: give the prompt as --prompt TEXT" in capfd.readouterr().err
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", None)
        assert main([*words, "--prompt", "a"]) == 2
    assert "standard output is closed" in capfd.readouterr().err
    monkeypatch.setattr(sys, "stderr", None)
    assert main([*words[:2], "--tokens", "1", "--max-tokens", "2"]) == 0
    assert capfd.readouterr().out.count(",") == 2, "facts went to standard output"


def test_a_small_model_has_one_thread(texts: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its parameters alone, and unless the user says how many."""
    from colossus.inference import ranks
    from colossus.inference.plan import plan_config

    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert ranks.threads_alone(texts, 8) == 1
    sizes = sum(math.prod(each.shape) for key, each in texts.manifest.tensors.items() if key.startswith("model/"))
    monkeypatch.setattr(ranks, "_FEW_PARAMETERS", sizes)
    assert ranks.threads_alone(texts, 8) == 8
    monkeypatch.setattr(ranks, "_FEW_PARAMETERS", sizes + 1)
    assert ranks.threads_alone(texts, 8) == 1
    heard: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", heard.append)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    with ranks.Ranks(texts, plan_config(texts)):
        assert heard == [1]
    assert heard == [1, 8]
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert ranks.threads_alone(texts, 3) == 3


def test_a_terminal_gets_letters_and_obeys_nothing() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    letters = "a\u3000b\u00a0c\u200c\u200dd\u00ade\u0301\t\n"
    assert harmless(letters) == letters
    assert harmless("\x1b[2J\x9b\x07\x7f\u202e\u2066") == "\ufffd[2J" + 5 * "\ufffd"
    for tokens, shown in ((b"a\r\nb", "xa\nb\n"), (b"a\rb", "xa\ufffdb\n"), (b"a\r", "xa\n")):
        out = Terminal()
        texts = Texts(["x"], [[120]], ByteTokenizer(), is_json=False, out=out)
        for at, token in enumerate(tokens, 1):
            texts.add([token], ["stop" if at == len(tokens) else None])
        assert out.getvalue() == shown


def test_json_has_no_half_of_a_letter(texts: Source, capfd: Captured) -> None:
    prompt = b"a\xff".decode("utf-8", "surrogateescape")
    found = data(capfd, str(texts.folder), "--tokenizer", "bytes", "--prompt", prompt, "--max-tokens", "1")
    assert found["results"][0]["prompt"] == "a\ufffd"
    assert found["results"][0]["prompt_tokens"] == [97, 255]


def test_options_that_say_little_of_a_model_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    from colossus.inference import plan

    monkeypatch.setattr(plan, "model_options", lambda config: SimpleNamespace(seq_len=16, vocab_size=61))
    assert plan.num_positions(None) is None  # type: ignore[arg-type]


LOOP = ["--tokenizer", "bytes", "--prompt", "abc", "--max-tokens", "1000000"]


@pytest.mark.parametrize("plan", [[], ["parallel.tensor=2"]], ids=["one", "1d"])
def test_ctrl_c_ends_json_with_what_there_is(rotary: Source, plan: list[str], capfd: Captured) -> None:
    from colossus.inference import ranks

    step, count = ranks.Ranks.step, itertools.count()

    def interrupted(self: ranks.Ranks) -> ranks.Step:
        if next(count) == 5:
            raise KeyboardInterrupt
        return step(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranks.Ranks, "step", interrupted)
        code, out, err = run(capfd, str(rotary.folder), *plan, *LOOP, "--json")
    assert code == 130
    (result,) = json.loads(out)["results"]
    assert (len(result["tokens"]), result["ended"]) == (5, "stopped")
    assert err.splitlines()[-1] == "colossus: stopped by Ctrl-C"


@pytest.mark.parametrize("plan", [[], ["parallel.tensor=2"]], ids=["one", "1d"])
def test_ctrl_c_ends_cleanly(rotary: Source, tmp_path: Path, plan: list[str]) -> None:
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
    assert "; decode: " in err.splitlines()[-2]
    assert len(ranks) == (2 if plan else 0)
    assert not any(map(is_running, ranks))


def test_ranks_end_with_what_has_started_them(rotary: Source, tmp_path: Path) -> None:
    words = [sys.executable, "-m", "colossus", "generate", str(rotary.folder), "parallel.tensor=2", *LOOP]
    process = start(words, tmp_path)
    wait_for(lambda: len(process.outputs[0]) > 20, process.pid)  # type: ignore[union-attr]
    ranks = children(process.pid)
    process.kill()
    wait_for(lambda: not any(map(is_running, ranks)), *ranks)


@pytest.mark.parametrize("plan", [[], ["parallel.pipeline=2"]], ids=["one", "pipeline"])
def test_a_reader_that_goes_is_no_error(rotary: Source, tmp_path: Path, plan: list[str]) -> None:
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:  # a process whose standard output nobody reads
        os.dup2(write, 1)
        os.dup2(os.open(str(tmp_path / "err"), os.O_CREAT | os.O_WRONLY), 2)
        os.close(read)
        sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)
        code = main(["generate", str(rotary.folder), *plan, *LOOP])
        sys.stderr.flush()
        os._exit(code)
    os.close(write)
    assert os.read(read, 8).startswith(b"abc")
    os.close(read)
    ended: list[int] = []

    def has_ended() -> bool:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            ended.append(os.waitstatus_to_exitcode(status))
        return bool(done)

    wait_for(has_ended, pid)
    assert ended == [0]
    assert "Traceback" not in (tmp_path / "err").read_text()


def test_a_folder_of_hugging_face_continues_its_text(tmp_path: Path, capfd: Captured) -> None:
    """Written from a checkpoint: the same tokens, up to the one that its config says ends a text."""
    from colossus.checkpoint.sources import open_weights
    from colossus.hf.convert import to_hf
    from colossus.inference import find_source, generate, load_model

    source = save(tmp_path / "ours", MODELS["llama"])
    model = load_model(source)
    (whole,) = generate(model, [[5, 7, 9]], max_tokens=9)
    model.close()
    with open_weights(source.folder) as reader:
        to_hf(reader, tmp_path / "theirs")
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
    assert "does not say how its text became tokens" in err
