"""The adapter of the lm-eval harness, which is not installed here, against a stand-in of its documented interface."""

from __future__ import annotations

import abc
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.inference import LENGTH, plain, save

from colossus.cli.main import main
from colossus.inference.config import WeightSource
from colossus.inference.generated_text import Tokenizer
from colossus.inference.harness import HarnessModel

#: a letter is an id
MODEL = dict(type="GPT", num_layers=2, hidden_size=24, num_heads=4, vocab_size=256, seq_len=LENGTH)
PAIRS = [("abc", "de"), ("", "xy"), ("ab c ", "d"), ("a" * 30, "bcd"), ("q", "r" * 20)]
TEXTS = ["abcdefghij" * 3, "a", "abcdefghijkl"]
CONTEXTS = [("abc", dict(until=["\n"], max_gen_toks=5)), ("xyz" * 9, dict(until="q", max_gen_toks=3))]


class LM(abc.ABC):
    """The interface of lm_eval.api.model.LM, by its documentation."""

    def __init__(self) -> None:
        self._rank, self._world_size = 0, 1

    @abc.abstractmethod
    def loglikelihood(self, requests: Any) -> list[tuple[float, bool]]: ...

    @abc.abstractmethod
    def loglikelihood_rolling(self, requests: Any) -> list[float]: ...

    @abc.abstractmethod
    def generate_until(self, requests: Any) -> list[str]: ...


def simple_evaluate(model: Any, tasks: list[str], limit: int | None = None, num_fewshot: int | None = None) -> Any:
    assert isinstance(model, LM)
    assert (tasks, limit, num_fewshot) == (["one", "two"], 3, None)

    def requests(arguments: Any) -> list[Any]:
        return [SimpleNamespace(args=args) for args in arguments]

    results = dict(
        pairs=model.loglikelihood(requests(PAIRS)),
        rolling=model.loglikelihood_rolling(requests((text,) for text in TEXTS)),
        texts=model.generate_until(requests(CONTEXTS)),
    )
    return {"results": {"one": results, "two": {"acc": 0.5}}}


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    package, api, model = ModuleType("lm_eval"), ModuleType("lm_eval.api"), ModuleType("lm_eval.api.model")
    vars(package).update(simple_evaluate=simple_evaluate, __spec__=SimpleNamespace(), __path__=[])
    vars(model).update(LM=LM)
    for module in (package, api, model):
        monkeypatch.setitem(sys.modules, module.__name__, module)


def plain_log_probs(twin: Any, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = twin(torch.tensor([ids]))
    return logits[0].log_softmax(-1)


def wanted(source: WeightSource) -> dict[str, Any]:
    """What plain torch says, one text after the other."""
    twin = plain(source, MODEL)
    pairs = []
    for context, continuation in PAIRS:
        text = (context or "\0") + continuation
        context_length = len(context.rstrip() or "\0")
        ids = [ord(letter) for letter in text]
        scored = min(len(ids) - context_length, LENGTH)
        ids = ids[-LENGTH - 1 :]
        log_probs, targets = plain_log_probs(twin, ids[:-1])[-scored:], ids[-scored:]
        total = sum(log_probs[number, target].item() for number, target in enumerate(targets))
        pairs.append((total, log_probs.argmax(-1).tolist() == targets))
    rolling = []
    for text in TEXTS:
        ids, total = [0, *map(ord, text)], 0.0
        for stop in range(1 + LENGTH, len(ids) + LENGTH, LENGTH):  # the last window is as long as the others
            last, first = min(stop, len(ids)), stop - LENGTH
            window = ids[max(0, last - LENGTH - 1) : last]
            log_probs = plain_log_probs(twin, window[:-1])
            total += sum(log_probs[-number, window[-number]].item() for number in range(1, last - first + 1))
        rolling.append(total)
    texts = []
    for context, options in CONTEXTS:
        ids = [ord(letter) for letter in context][-max(1, LENGTH - options["max_gen_toks"]) :]
        new = []
        for _ in range(options["max_gen_toks"]):
            new.append(int(plain_log_probs(twin, [*ids, *new])[-1].argmax()))
        text = bytes(new).decode("utf-8", "replace")
        texts.append(text.partition(options["until"][0])[0])
    return dict(pairs=pairs, rolling=rolling, texts=texts)


@pytest.mark.parametrize("plan", ["", "parallel.tensor=2", "parallel.data=2 parallel.pipeline=2"])
def test_scores_and_texts_are_those_of_plain_torch(
    plan: str, tmp_path: Path, stand_in: None, capsys: pytest.CaptureFixture[str]
) -> None:
    source = save(tmp_path / "run", MODEL)
    overrides = [*plan.split(), "train.precision=fp64"]
    harness = ["--tasks", "one,two", "--limit", "3", "--tokenizer", "bytes", "--json"]
    arguments = ["evaluate", str(tmp_path / "run"), *harness, *overrides]
    assert main([*arguments, "train.eval_batch_size=4"]) == 0
    results = json.loads(capsys.readouterr().out)
    assert results["two"] == {"acc": 0.5}
    own, oracle = results["one"], wanted(source)
    assert [greedy for _, greedy in own["pairs"]] == [greedy for _, greedy in oracle["pairs"]]
    torch.testing.assert_close([x for x, _ in own["pairs"]], [x for x, _ in oracle["pairs"]], rtol=1e-10, atol=0)
    torch.testing.assert_close(own["rolling"], oracle["rolling"], rtol=1e-10, atol=0)
    assert own["texts"] == oracle["texts"]


def test_windows_are_those_of_the_documentation() -> None:
    """Each token is predicted once, and the last window is a whole one."""
    letters = Tokenizer(lambda text: [int(letter) for letter in text], lambda ids: "".join(map(str, ids)), 10, (7,))
    model = HarnessModel(lambda work: None, letters, 4, 8)
    assert [*model._windows(range(10))] == [([7, 0, 1, 2, 3], 4), ([3, 4, 5, 6, 7], 4), ([5, 6, 7, 8, 9], 2)]


def test_without_the_harness_it_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, message in (
        (["--tasks", "one"], "--tasks needs EleutherAI's lm-eval harness, which is not installed: pip install lm_eval"),
        (["--limit", "3"], "--limit and --fewshot are of --tasks, and --nproc is not"),
        (["--tasks", "one", "--nproc", "2"], "tasks run in one process, or under a plan of overrides"),
    ):
        assert main(["evaluate", str(tmp_path), *arguments]) == 2
        assert message in capsys.readouterr().err
