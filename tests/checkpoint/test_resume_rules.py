"""What happens where a run that goes on is not the run that was saved: rules, warnings that one rank tells, errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from helpers.ranks import run_ranks
from helpers.resumed import WIDTH, Vectors, engine_of, load, own_batches, saved, settings
from torch import Tensor
from torch.utils.data import DataLoader

from colossus.checkpoint.folder import name_of

# -- the data and random generators ---------------------------------------------------------------------------


def test_another_seed_or_batch_size_is_told_once(tmp_path: Path) -> None:
    path = saved(tmp_path, world=2, parallel=dict(data=2))
    config = settings(tmp_path / "other", dict(tensor=2), train=dict(seed=4, global_batch_size=4))
    ranks = load(path, config, lambda engine: engine.loader.step, world=2)
    assert [seen for seen, _, _ in ranks] == [2, 2]
    assert [len(told) for _, told, _ in ranks] == [2, 0]
    assert "seed was 3 when the checkpoint was written and is 4 now" in ranks[0][1][0]
    assert "global_batch_size was 8 when the checkpoint was written and is 4 now" in ranks[0][1][1]


def next_samples(engine: Any) -> Tensor:
    return next(engine.loader)["inputs"]


OWN = dict(type=own_batches, per_rank=True)


def test_a_loaders_own_place_with_other_data_ranks(tmp_path: Path) -> None:
    """Each data rank goes on from its own place where there are as many; else from that of the first."""
    path = saved(tmp_path, world=2, parallel=dict(data=2), given=dict(data=OWN))
    wanted = torch.stack([Vectors()[index]["inputs"] for index in range(16, 24)]).double()
    same = load(path, settings(tmp_path / "same", dict(data=2)), next_samples, world=2, data=OWN)
    assert torch.equal(torch.cat([seen for seen, _, _ in same]), wanted)
    assert not any(told for _, told, _ in same)
    more = load(path, settings(tmp_path / "more", dict(data=4)), next_samples, world=4, data=OWN)
    assert torch.equal(torch.cat([seen for seen, _, _ in more]), wanted)


def shuffled() -> Any:
    return DataLoader(Vectors(), batch_size=8, shuffle=True)


def test_a_global_order_is_the_same_for_any_number_of_data_ranks(tmp_path: Path) -> None:
    """Of a loader that is shuffled by the global generator; it is read up to its place, which one rank tells."""
    path = saved(tmp_path, world=2, parallel=dict(data=2), given=dict(data=shuffled))
    seen = {}
    for world, parallel in ((1, {}), (2, dict(tensor=2)), (4, dict(data=4))):
        ranks = load(path, settings(tmp_path / "other", parallel), next_samples, world=world, data=shuffled)
        assert [len(told) for _, told, _ in ranks] == [1] + [0] * (world - 1)
        assert "has no state_dict: reading 2 items of pass 0 again to resume" in ranks[0][1][0]
        whole = [each for each, _, _ in ranks] if "tensor" not in parallel else [ranks[0][0]]
        seen[str(parallel)] = torch.cat(whole)
    first, *others = seen.values()
    assert first.shape == (8, WIDTH)
    assert all(torch.equal(first, other) for other in others)


def draws_and_saves(rank: int, config: dict[str, Any]) -> float:
    engine = engine_of(config)
    torch.rand(5)
    engine.checkpoints.save(background=False).wait()
    number = torch.rand(()).item()
    engine.close()
    return number


def test_generators_under_another_plan(tmp_path: Path) -> None:
    """Under the same one they go on; else they are seeded anew, the same on the ranks of a model."""
    numbers = run_ranks(2, draws_and_saves, settings(tmp_path, dict(data=2)), with_context=False)
    assert numbers[0] != numbers[1]

    def look(engine: Any) -> float:
        return torch.rand(()).item()

    path = tmp_path / name_of(0)
    same = load(path, settings(tmp_path / "same", dict(data=2)), look, world=2)
    assert [seen for seen, _, _ in same] == numbers
    other = load(path, settings(tmp_path / "other", dict(data=2, tensor=2)), look, world=4)
    first, again, second, _ = seen = [seen for seen, _, _ in other]
    assert (first, second) == (again, seen[3])
    assert len({*numbers, first, second}) == 4
