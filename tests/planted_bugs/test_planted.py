"""Mistakes of the field, planted into a plain-torch trainer: ``colossus verify`` names each of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from planted_bugs import trainer

from colossus.cli.main import main
from colossus.context.local_ranks import LocalRanks

#: mistake -> the value that differs, and what the report says of it
PLANTED: dict[str, tuple[str, str]] = {
    # sums of gradients
    "replicas unsummed": ("at step 1: the gradient of norm.weight", "their sum is the reference's"),
    "a bucket left out": ("at step 1: the gradient of blocks.1.mlp.down.bias", "their sum is the reference's"),
    "norm unsummed over parts": ("at step 1: the gradient of blocks.1.norm.weight", "their sum is the reference's"),
    "gradient of an input": ("at step 1: the gradient of blocks.1.mlp_norm.weight", "their sum is the reference's"),
    "last microbatch unsummed": ("at step 1: the gradient of norm.weight", "copies of one parameter drift apart"),
    "divided too seldom": (
        "at step 1: the gradient",
        "all 19 gradients are 2 times the reference: the number of groups",
    ),
    "clipped before the sum": ("at step 1: the gradient", "their sum is the reference's: the sum over these ranks"),
    "gradients not cleared": ("at step 2: the gradient of norm.weight", "plus the gradient of the step before"),
    "summed in bfloat16": (
        "at step 1: the gradient of norm.weight",
        "numbers of bfloat16, though its dtype is float32",
    ),
    "one use of a tied weight": (
        "at step 1: the gradient of embedding.weight",
        "outputs of modules agree, so a backward",
    ),
    "a layer without gradients": ("at step 1: the gradient of blocks.1.mlp.up.weight", "it is zero: no loss depends"),
    # the loss
    "microbatches not divided": ("at step 1: the gradient", "3 times the reference: the number of forwards of a step"),
    "mean of means": ("at step 1: the gradient", "the forwards' means: they have 3, 4, 5, 12, 12, 12 valid tokens"),
    "padding counted": ("at step 1: the gradient", "all gradients differ: look at the loss function"),
    "auxiliary loss by ranks": ("at step 1: the gradient", "all gradients differ: look at the loss function"),
    "sign of the loss": ("at step 1: the gradient", "all 19 gradients are the reference with the other sign"),
    # forwards
    "mask sees the future": ("at step 1: the gradient", "output that differs is that of blocks.0.attention.out, by"),
    "bias on every part": ("at step 1: the gradient", "output that differs is that of blocks.0.attention.out, by"),
    "mean of partial sums": ("at step 1: the gradient", "output that differs is that of blocks.0.attention.out, by"),
    "another epsilon": ("at step 1: the gradient", "output that differs is that of blocks.0.mlp_norm, by"),
    "positions of a rank": (
        "at step 1: the gradient",
        "output that differs is that of blocks.0.norm on ranks 2, 3, by",
    ),
    # the start
    "parts from one seed": ("from the start: the initial value of blocks.0.attention.qkv", "are equal: each draws its"),
    "replicas start apart": ("from the start: the initial value", "ranks that have the same part of it have different"),
    "fan of a part": ("from the start: the initial value of blocks.0.attention.out", "it is 1.414 times the reference"),
    "blocks of a fused weight": ("from the start: the initial value", "rows in another order (32 of 48 are elsewhere)"),
    # samples
    "same samples on replicas": ("at step 1: the samples", "ranks 0, 1, 2, 3 have the same samples"),
    "a sample twice": ("at step 1: the samples", "1 are in it more often than there"),
    # the update
    "norm counts copies": ("at step 1: the norm of the gradients", "it counts every rank's parts"),
    "norm of own parts": (
        "at step 1: the norm of the gradients",
        "own parts: the sum of squares over ranks is missing",
    ),
    "rate by replicas": ("at step 1: embedding.weight after the optimizer", "its update is 2 times the reference"),
    "decay twice": ("at step 1: embedding.weight after the optimizer", "-0.001 times the weight: weight decay"),
    "a parameter left out": ("blocks.0.mlp_norm.weight after the optimizer", "it did not change: no optimizer has it"),
    "update on one replica": ("embedding.weight after the optimizer", "have the same part of it have different values"),
}
#: one of each guess
BY_DEFAULT = {
    "gradient of an input", "divided too seldom", "gradients not cleared", "mean of means", "mask sees the future",
    "blocks of a fused weight", "same samples on replicas", "norm counts copies", "decay twice",
}  # fmt: skip
#: mistakes of the update that AdamW would hide
OF_SGD = {"rate by replicas", "decay twice", "a parameter left out", "update on one replica"}
#: mistakes that change less than rounding in bfloat16 does
BELOW_BF16 = {"another epsilon", "decay twice", "summed in bfloat16"}


class Ranks:
    def __init__(self, rank: int) -> None:
        self.rank = rank

    def train(self, folder: Path, wrong: set[str], options: dict[str, Any]) -> None:
        trainer.train(self.rank, 2, 2, folder, wrong, **options)


@pytest.fixture(scope="module")
def ranks() -> Iterator[LocalRanks]:
    with LocalRanks(4, Ranks) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[torch.dtype, bool], Path]:
    folder = tmp_path_factory.mktemp("references")
    paths = {}
    for dtype in (torch.float32, torch.bfloat16):
        for sgd in (False, True):
            paths[dtype, sgd] = folder / f"{dtype}-{sgd}"
            trainer.train(0, 1, 1, paths[dtype, sgd], set(), dtype=dtype, sgd=sgd)
    return paths


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.long)])
def test_the_right_one_agrees(ranks: Any, references: Any, tmp_path: Path, capsys: Any, dtype: torch.dtype) -> None:
    for sgd in (False, True):
        ranks.call("train", tmp_path / str(sgd), set(), {"dtype": dtype, "sgd": sgd})
        assert main(["verify", str(tmp_path / str(sgd)), str(references[dtype, sgd])]) == 0
        out = capsys.readouterr().out
        assert out.startswith("AGREE")
        assert f"up to rounding in {str(dtype)[6:]}" in out
        assert all(line in out for line in ("gradients                 57", "updates of weights        57"))


@pytest.mark.parametrize(
    "wrong", [name if name in BY_DEFAULT else pytest.param(name, marks=pytest.mark.long) for name in PLANTED]
)
def test_each_is_named(ranks: Any, references: Any, tmp_path: Path, capsys: Any, wrong: str) -> None:
    options = {"dtype": torch.float32, "sgd": wrong in OF_SGD}
    ranks.call("train", tmp_path / "run", {wrong}, options)
    assert main(["verify", str(tmp_path / "run"), str(references[torch.float32, wrong in OF_SGD])]) == 3
    out = capsys.readouterr().out
    value, cause = PLANTED[wrong]
    assert value in out.splitlines()[0], out
    assert cause in out, out


@pytest.mark.long
@pytest.mark.parametrize("wrong", PLANTED.keys() - BELOW_BF16)
def test_each_is_seen_in_bfloat16(ranks: Any, references: Any, tmp_path: Path, wrong: str) -> None:
    options = {"dtype": torch.bfloat16, "sgd": wrong in OF_SGD}
    ranks.call("train", tmp_path / "run", {wrong}, options)
    assert main(["verify", str(tmp_path / "run"), str(references[torch.bfloat16, wrong in OF_SGD])]) == 3
