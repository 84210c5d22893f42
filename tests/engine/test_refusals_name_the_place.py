"""Every refusal met in a model names the module, by its name in the model, and the user's line."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.ranks import RankError, run_ranks
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import colossus
from colossus import layers
from colossus.context.parallel_context import ParallelContext
from colossus.launch import rank_failure

FILE = Path(__file__).name
#: the line of this file that holds a mark
LINES = {
    mark: number
    for number, line in enumerate(Path(__file__).read_text().splitlines(), start=1)
    for mark in re.findall(r"# at: (\w+)", line)
}


class Pair(nn.Module):
    def __init__(self, wrong: str) -> None:
        super().__init__()
        self.up, self.down = layers.Linear(6, 8, split="column"), layers.Linear(8, 6, split="row")
        self.plain, self.wrong = nn.Linear(6, 6), wrong

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        if self.wrong == "index":
            h = h[:, :3]  # at: index
        if self.wrong == "view":
            h = h.flip(-1)  # at: view
        if self.wrong == "plain":
            h = h + torch.ones(4).double()  # at: plain
        if self.wrong == "torch":
            x = self.plain(x[..., :5])  # at: torch
        if self.wrong == "hook":
            h.register_hook(lambda grad: grad / grad.norm())  # at: hook
        if self.wrong == "raise":
            raise KeyError("mine")  # at: raise
        return self.down(torch.relu(h))


class Checkpointed(Pair):
    """Refuses only in the recomputation."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(self.inside, x, use_reentrant=False)  # type: ignore[no-untyped-call]
        return out

    def inside(self, x: Tensor) -> Tensor:
        h = self.up(x)
        if torch._C._current_graph_task_id() != -1:
            h.sum(1)  # at: recompute
        return self.down(torch.relu(h))


class Net(nn.Module):
    def __init__(self, wrong: str = "") -> None:
        super().__init__()
        bad = Checkpointed(wrong) if wrong == "recompute" else Pair(wrong)
        self.blocks = nn.ModuleList([Pair(""), bad])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x

    def pipeline_blocks(self) -> list[Any]:
        return [layers.PipelineBlock(lambda x, b=block: x + b(x), block) for block in self.blocks]

    def loss(self, y: Tensor, batch: Tensor) -> tuple[Tensor, int]:
        return y.square().sum(), y.shape[0]


def engine_of(wrong: str, parallel: dict[str, Any], batch: int = 4) -> Any:
    config = dict(
        parallel=parallel,
        optimizer=dict(type="SGD", lr=0.1),
        train=dict(global_batch_size=batch, precision="fp64", seed=1),
        comm=dict(timeout_seconds=2.0),
        device="cpu",
    )
    return colossus.initialize(config, model=lambda: Net(wrong))


def told(act: Any, wrong: type[Exception] = Exception) -> str:
    try:
        act()
    except wrong as error:
        record = rank_failure.of_exception(error, 0)
        return record.traceback
    return "nothing"


def place(mark: str, name: str, kind: str) -> str:
    code = Path(__file__).read_text().splitlines()[LINES[mark] - 1].strip()
    return rf"\(in {re.escape(name)} \({kind}\), at \S*{FILE}:{LINES[mark]}: {re.escape(code)}\)"


TENSOR = dict(tensor=dict(mode="1d", size=2))


@pytest.mark.parametrize("parallel", [TENSOR, {**TENSOR, "pipeline": 2}], ids=["tensor", "pipeline"])
def test_in_a_step(parallel: dict[str, Any]) -> None:
    is_piped = "pipeline" in parallel
    marks = ["index"] if is_piped else ["index", "view", "plain", "torch", "hook", "raise", "recompute"]

    def body(rank: int) -> Any:
        messages = {}
        for mark in marks:
            engine = engine_of(mark, parallel)
            messages[mark] = told(lambda engine=engine: engine.train_step(torch.ones(4, 6, dtype=torch.float64)))
            engine.close()
        return messages

    results = run_ranks(4 if is_piped else 2, body, with_context=False)
    for messages in results[2:] if is_piped else results:
        for mark, words in messages.items():
            expected = place(mark, "blocks.1", "Checkpointed" if mark == "recompute" else "Pair")
            if mark == "torch":
                expected = place(mark, "blocks.1.plain", "Linear")
            if mark == "hook":
                expected = expected.replace(r"\(in blocks\.1 \(Pair\), ", "")
            assert re.search(expected, words), words


def test_a_layer_outside_of_an_engine() -> None:
    def body(context: ParallelContext) -> list[str]:
        model: Any = colossus.build(Net, context, dtype=torch.float64)
        x = torch.ones(3, 6, dtype=torch.float64)
        with context:
            alone = told(lambda: model.blocks[0].up(x).sum(-1))  # at: alone
            inside = told(lambda: model.blocks[1].down(model.blocks[0].up(x)[..., :1]))  # at: inside
            made = told(lambda: layers.Linear(6, 7, split="column"))  # at: made
        return [alone, inside, made]

    for alone, inside, made in run_ranks(2, body):
        for mark, words in (("alone", alone), ("inside", inside), ("made", made)):
            assert re.search(rf"at \S*{FILE}:{LINES[mark]}: ", words), words


def test_ranks_that_run_different_modules_say_which() -> None:
    def body(context: ParallelContext) -> None:
        model: Any = colossus.build(Net, context, dtype=torch.float64)
        x = torch.ones(3, 6, dtype=torch.float64)
        model.blocks[context.rank].down(model.blocks[0].up(x if context.rank else x[:2]))  # at: program

    with pytest.raises(RankError) as failed:
        run_ranks(2, body)
    words = str(failed.value)
    assert re.search(r"do not run the same program", words), words
    for rank in range(2):
        expected = rf"\(in blocks\.{rank}\.down \(Linear\), at \S*{FILE}:{LINES['program']}: "
        assert re.search(expected, words), words
