"""Checkpoints of tiny runs: one plan after the other in one group of ranks, and what two checkpoints have in common."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.ranks import run_ranks
from torch import Tensor

import colossus
from colossus.checkpoint.folder import name_of
from colossus.checkpoint.reader import CheckpointReader
from colossus.checkpoint.values import decode

#: (step, config) -> the global batch
BatchOf = Callable[[int, Mapping[str, Any]], Any]


def visit(
    rank: int, links: Sequence[tuple[dict[str, Any], Path | None]], batch_of: BatchOf, options: dict[str, Any]
) -> list[tuple[float, float]]:
    """Body of a rank: under each config load what the one before has saved, save it again, train a step, save."""
    results = []
    for config, source in links:
        engine = colossus.initialize(config, **options)
        index, count = engine.context.index("data"), engine.context.size("data")
        if source is not None:
            engine.checkpoints.load(source)
            engine.checkpoints.save(background=False).wait()
        batch = batch_of(engine.completed_steps, config)
        part = config["train"]["global_batch_size"] // count
        result = engine.train_step({key: value[index * part : (index + 1) * part] for key, value in batch.items()})
        engine.checkpoints.save(background=True).wait()
        results.append((result.loss, result.grad_norm))
        engine.close()
    return results


def run_chain(
    root: Path, chain: Sequence[tuple[int, dict[str, Any]]], batch_of: BatchOf, **options: Any
) -> list[tuple[float, float]]:
    """Loss and norm of each of a chain of (ranks, config); number ``n`` saves into ``root/n``, twice: as it was loaded,
    and after its step. Neighbours with as many ranks share these."""
    folders = [root / str(number) for number in range(len(chain))]
    sources = [None, *(folder / name_of(number + 1) for number, folder in enumerate(folders))]
    links = [
        (world, ({**config, "checkpoint": dict(dir=str(folder), keep_last=0)}, source))
        for (world, config), folder, source in zip(chain, folders, sources, strict=False)
    ]
    results = []
    for world, same in itertools.groupby(links, lambda link: link[0]):
        ranks = run_ranks(world, visit, [link for _, link in same], batch_of, options, with_context=False)
        assert all(result == ranks[0] for result in ranks), "ranks report different numbers"
        results += ranks[0]
    return results


@dataclass(frozen=True)
class Contents:
    """All that a checkpoint holds, read in one process.

    Attributes:
        tensors: ``model/..``, ``optimizer/..``, ``optimizer_whole/..`` and ``strategy/..`` by key.
        values: decoded, but for those of single ranks and of how a run is made.
    """

    tensors: dict[str, Tensor]
    values: dict[str, Any]
    aliases: dict[str, str]


def contents(folder: Path) -> Contents:
    with CheckpointReader(folder) as reader:
        reader.verify()
        sections = "model/", "optimizer/", "optimizer_whole/", "strategy/"
        kept = [key for key in reader.manifest.tensors if key.startswith(sections)]
        values = {
            path: decode(value, reader.tensor)
            for path, value in reader.manifest.values.items()
            if not path.startswith(("ranks/", "loader/", "strategy_values/", "optimizer_groups/", "frozen/"))
        }
        options = [
            decode(value, reader.tensor)
            for path, value in reader.manifest.values.items()
            if path.startswith("optimizer_groups/")
        ]
        by_stage = [value for path, value in reader.manifest.values.items() if path.startswith("frozen/")]
        values["frozen"] = sorted({name for value in by_stage for name in decode(value, reader.tensor)})
        values["groups"] = next(each["now"] for each in options if each)
        return Contents({key: reader.tensor(key) for key in kept}, values, dict(reader.manifest.aliases))


def assert_same_contents(mine: Contents, wanted: Contents, what: str) -> None:
    """To the bit."""
    assert mine.tensors.keys() == wanted.tensors.keys(), (
        f"{what}: {sorted(mine.tensors.keys() ^ wanted.tensors.keys())} in one of them only"
    )
    for key, value in wanted.tensors.items():
        assert mine.tensors[key].dtype == value.dtype, f"{what}: {key} is {mine.tensors[key].dtype}, was {value.dtype}"
        assert same_bits(mine.tensors[key], value), f"{what}: {key} differs"
    assert_same_values(mine.values, wanted.values, what)
    assert mine.aliases == wanted.aliases, what


def assert_same_values(mine: Any, wanted: Any, what: str) -> None:
    assert type(mine) is type(wanted), f"{what}: {mine!r}, was {wanted!r}"
    if isinstance(wanted, dict):
        assert mine.keys() == wanted.keys(), f"{what}: {sorted(map(str, mine))}, was {sorted(map(str, wanted))}"
        for key, value in wanted.items():
            assert_same_values(mine[key], value, f"{what}/{key}")
    elif isinstance(wanted, list | tuple):
        assert len(mine) == len(wanted), what
        for index, (one, other) in enumerate(zip(mine, wanted, strict=True)):
            assert_same_values(one, other, f"{what}.{index}")
    elif isinstance(wanted, Tensor):
        assert mine.dtype == wanted.dtype, what
        assert same_bits(mine, wanted), f"{what}: {mine}, was {wanted}"
    elif isinstance(wanted, np.ndarray):
        assert mine.dtype == wanted.dtype, what
        assert np.array_equal(mine, wanted), what
    else:
        assert mine == wanted or (mine != mine and wanted != wanted), f"{what}: {mine!r}, was {wanted!r}"


def same_bits(one: Tensor, other: Tensor) -> bool:
    """NaN and the sign of zero included."""
    return one.shape == other.shape and torch.equal(bits(one), bits(other))


def bits(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def assert_chain_is_one_process(
    root: Path,
    chain: Sequence[tuple[int, dict[str, Any]]],
    config: Callable[[dict[str, Any]], dict[str, Any]],
    batch_of: Callable[[int], dict[str, Tensor]],
    *,
    rel: float,
) -> list[tuple[float, float]]:
    """That each plan of a chain of (ranks, plan) goes on with all that the one before has saved, as one process would.

    Returns:
        Loss and norm of each step of the one process.
    """

    def alone(rank: int) -> list[tuple[float, float]]:
        engine = colossus.initialize(config({}))
        results = [engine.train_step(batch_of(step)) for step in range(len(chain))]
        engine.close()
        return [(result.loss, result.grad_norm) for result in results]

    told = run_chain(root, [(world, config(plan)) for world, plan in chain], lambda step, _: batch_of(step))
    (wanted,) = run_ranks(1, alone, with_context=False)
    for number, (mine, other) in enumerate(zip(told, wanted, strict=True)):
        assert mine == pytest.approx(other, rel=rel), chain[number]
        if number:
            saved, again = (contents(root / str(link) / name_of(number)) for link in (number - 1, number))
            assert_same_contents(again, saved, str(chain[number]))
    return wanted
