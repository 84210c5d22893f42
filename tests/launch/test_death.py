"""A replica dies: the run goes on without it, or it ends in words; `helpers/launched/dying.py` is what runs."""

from __future__ import annotations

import json
import random
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from helpers.launching import LAUNCH, finish, rows_of, start

from colossus.checkpoint.manifest import read_manifest
from colossus.context.death_board import DeathBoard
from colossus.context.grid import RankGrid
from colossus.launch import deaths, failure, nodes
from colossus.launch.causes import RankExit
from colossus.launch.deaths import Deaths
from colossus.launch.failure import FailureRecord
from colossus.launch.nodes import NodeEnd, Nodes

CONFIG = Path(__file__).parents[1] / "helpers" / "launched" / "dying.py"
KILLED, RAISED, GOOD = RankExit(-9), RankExit(1), RankExit(0)


# -- launched runs --------------------------------------------------------------------------------------------


def run(folder: Path, *arguments: str, **variables: str) -> tuple[int, str, str]:
    folder.mkdir(exist_ok=True)
    return finish(start([*LAUNCH[:-1], str(CONFIG), "--run-dir", "run", *arguments], folder, **variables))


def told_of(folder: Path) -> list[dict[str, Any]]:
    told: list[dict[str, Any]] = json.loads((folder / "run" / deaths.FILE).read_text())
    return told


def require_went_on(folder: Path, out: str, err: str, replica: int, ranks: list[int], living: int) -> None:
    (told,) = told_of(folder)
    assert (told["replicas"], told["ranks"]) == ([replica], ranks)
    assert f"replica {replica} died: rank " in told["reason"]
    assert f"the others went on without it from step {told['first_step_without']}" in err
    rows = rows_of(folder / "run")
    last = rows[-1]
    assert last["step"] == 40
    assert sorted({row["step"] for row in rows}) == [row["step"] for row in rows]
    assert last["loss"] < 0.005 * rows[0]["loss"]  # 0.0005 at most where nobody dies
    assert last["validation_loss"] < 0.002
    assert last["tokens"] == 4 * living  # of the replicas that live
    num_samples = 4 * (40 - told["first_step_without"] + 1)
    assert f"{num_samples} samples of its share were not trained on" in err
    assert 0.0 < told["push_sum_weight"] < living + 1
    assert "done: 40 steps" in out


def test_the_others_go_on_when_the_first_replica_dies(tmp_path: Path) -> None:
    """With messages in flight; the rank that died wrote the metrics, showed the numbers and completed checkpoints."""
    code, out, err = run(
        tmp_path,
        "parallel.data=3",
        "parallel.strategy.overlap=1",
        "train.global_batch_size=12",
        "checkpoint.every=20",
        DEATHS="0:7",
    )
    assert code == 0, err
    require_went_on(tmp_path, out, err, 0, [0], 2)
    assert "step 40/40  checkpoint" in out
    # what was saved is a checkpoint of two replicas, and goes on as one
    manifest = read_manifest(tmp_path / "run" / "checkpoints" / "step-00000040")
    assert manifest.plan["axes"]["data"] == 2


@pytest.mark.long
@pytest.mark.parametrize(
    "strategy",
    [
        ["parallel.strategy.graph=complete"],
        ["parallel.strategy.overlap=2"],
        ["parallel.strategy.type=d-psgd"],
        ["parallel.strategy.type=d-psgd", "parallel.strategy.order=adapt_then_combine"],
        ["parallel.strategy.type=d-psgd", "parallel.strategy.graph=bipartite_exponential"],
        ["parallel.strategy.mix_optimizer_state=True", "optimizer.momentum=0.5"],
    ],
    ids=lambda strategy: " ".join(word.rpartition(".")[2] for word in strategy),
)
def test_any_replica_may_die_after_any_step(strategy: list[str], tmp_path: Path) -> None:
    generator = random.Random(str(strategy))
    rank, step = generator.randrange(4), generator.randrange(2, 17)
    code, out, err = run(tmp_path, *strategy, DEATHS=f"{rank}:{step}")
    assert code == 0, err
    require_went_on(tmp_path, out, err, rank, [rank], 3)
    if "graph=bipartite_exponential" in strategy[-1]:
        why = "bipartite_exponential does not fit 3: pairs odd replicas with even ones, so their number must be even"
        assert why in told_of(tmp_path)[0]["graph"]


@pytest.mark.long
def test_a_stop_and_a_death_together_leave_a_checkpoint_of_those_that_live(tmp_path: Path) -> None:
    """The death comes one step after the launcher was told to stop, before the step at which all stop."""
    code, out, err = run(
        tmp_path,
        "parallel.data=3",
        "train.global_batch_size=12",
        "train.eval_every=1000",
        "checkpoint.every=1000",
        "train.steps=1000",
        DEATHS="1:8",
        STOP="7",
    )
    assert code == 143, (out, err)
    (told,) = told_of(tmp_path)
    assert told["replicas"] == [1]
    (saved,) = (tmp_path / "run" / "checkpoints").glob("step-*")
    assert f"the latest checkpoint is {saved.relative_to(tmp_path)}" in out
    assert read_manifest(saved).plan["axes"]["data"] == 2


@pytest.mark.long
def test_mass_is_conserved_among_the_living(tmp_path: Path) -> None:
    """Of two that are left, the smallest and the largest push-sum weight are all there are, and their mean is 1."""
    code, _, err = run(
        tmp_path,
        "parallel.data=3",
        "parallel.strategy.log_every=2",
        "train.global_batch_size=12",
        DEATHS="2:8",
    )
    assert code == 0, err
    (told,) = told_of(tmp_path)
    assert 0.0 < told["push_sum_weight"] < 3.0
    rows = [row for row in rows_of(tmp_path / "run") if row["step"] > told["first_step_without"]]
    rows = [row for row in rows if "replica" not in row]
    assert len(rows) > 5
    for row in rows:  # steps are as large as before
        assert row["push_sum_min"] + row["push_sum_max"] == pytest.approx(2.0, rel=1e-13)


@pytest.mark.long
def test_the_other_ranks_of_the_replica_are_ended(tmp_path: Path) -> None:
    code, out, err = run(
        tmp_path, "parallel.data=3", "parallel.tensor=2", "train.global_batch_size=12", DEATHS="3:9", DEATH="raise"
    )
    assert code == 0, err
    require_went_on(tmp_path, out, err, 1, [2, 3], 2)
    assert "rank 3" in told_of(tmp_path)[0]["reason"]
    assert "ValueError: one of them has had enough" in err


@pytest.mark.long
def test_one_death_after_the_other_until_one_is_left(tmp_path: Path) -> None:
    code, _, err = run(tmp_path, DEATHS="1:5 3:13 0:24", STEP_SECONDS="0.2")
    assert code == 0, err
    told = told_of(tmp_path)
    assert [each["replicas"] for each in told] == [[1], [3], [0]]
    assert 1.0 < sum(each["push_sum_weight"] or 0.0 for each in told) < 4.0
    rows = rows_of(tmp_path / "run")
    assert rows[-1]["validation_loss"] < 0.01
    steps = [row["step"] for row in rows]
    assert steps[-1] == 40
    assert sorted(set(steps)) == steps


@pytest.mark.long
@pytest.mark.parametrize(("died", "variables"), [("2:9", {}), ("0:9", {"DEATH": "raise"})])
def test_a_death_ends_the_run_where_it_is_not_to_go_on(died: str, variables: dict[str, str], tmp_path: Path) -> None:
    began = time.monotonic()
    code, _, err = run(tmp_path, "parallel.strategy.on_death=stop", DEATHS=died, **variables)
    assert code == 1
    assert f"run failed: rank {died[0]} at step" in err
    assert time.monotonic() - began < 60.0  # far from the time-outs of what waits for the dead
    assert not (tmp_path / "run" / deaths.FILE).exists()


@pytest.mark.long
def test_two_deaths_at_once_end_the_run(tmp_path: Path) -> None:
    code, _, err = run(tmp_path, DEATHS="1:9 2:9")
    assert code == 1
    assert "the run could not go on after a death" in err
    assert "run failed: rank 1" in err


@pytest.mark.long
def test_a_death_in_the_midst_of_an_evaluation_ends_the_run(tmp_path: Path) -> None:
    """In words, and long before what the others do together would time out."""
    began = time.monotonic()
    code, _, err = run(tmp_path, "comm.timeout_seconds=300", DIES_IN_EVALUATION="2")
    assert code == 1
    assert time.monotonic() - began < 100.0
    assert "replica 2 died in the midst of an evaluation, a checkpoint or a sum" in err
    assert "run failed: rank 2 =" in err
    assert not (tmp_path / "run" / deaths.FILE).exists()


@pytest.mark.long
def test_a_run_goes_on_from_what_was_saved_after_a_death(tmp_path: Path) -> None:
    code, _, err = run(tmp_path, "checkpoint.every=10", DEATHS="2:12", STEP_SECONDS="0.05")
    assert code == 0, err
    saved = tmp_path / "run" / "checkpoints" / "step-00000030"
    for data in ("3", "4"):  # as many as were left, and from the average
        folder = tmp_path / data
        folder.mkdir()
        batch = f"train.global_batch_size={4 * int(data)}"
        code, out, err = run(
            folder, f"parallel.data={data}", batch, f"checkpoint.resume={saved}", "checkpoint.every=20", DEATHS=""
        )
        assert code == 0, err
        assert "at step 30, saved under data 3" in out
        assert rows_of(folder / "run")[-1]["loss"] < 0.05


def test_torchrun_is_told_that_it_cannot(tmp_path: Path) -> None:
    variables = {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    code, _, err = run(tmp_path, **variables)
    assert code == 2
    assert "on_death = 'continue' needs `colossus launch`" in err


# -- what the launcher decides ----------------------------------------------------------------------------------


class Store:
    """As much of torch's store as the board uses."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}

    def set(self, key: str, value: str) -> None:
        self.values[key] = value.encode()

    def get(self, key: str) -> bytes:
        return self.values[key]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self.values[key] for key in keys]

    def check(self, keys: list[str]) -> bool:
        return all(key in self.values for key in keys)

    def add(self, key: str, number: int) -> int:
        total = int(self.values.get(key, b"0")) + number
        self.values[key] = str(total).encode()
        return total

    def compare_set(self, key: str, expected: str, value: str) -> None:
        if self.values.get(key, b"").decode() == expected:
            self.set(key, value)


class Launcher:
    """One that looks at some ranks of a plan of 3 replicas x 2 tensor ranks."""

    def __init__(
        self, store: Store, here: range, monkeypatch: pytest.MonkeyPatch, *, are_independent: bool = False
    ) -> None:
        monkeypatch.setattr(deaths, "_RECORD_SECONDS", 0.02)
        monkeypatch.setattr(deaths, "_HEARSAY_SECONDS", 0.1)
        self.board, self.records = DeathBoard(store), list[FailureRecord]()
        self.deaths = Deaths(GRID, list(here), self.board, lambda: self.records, are_independent=are_independent)
        self.exits: dict[int, RankExit] = {}

    def see(self, rank: int, ended: RankExit, kind: failure.Kind | None = None, message: str = "m") -> None:
        self.exits[rank] = ended
        if kind is not None:
            self.records.append(FailureRecord(rank, kind, "ValueError", message, "", step=4))

    def look(self) -> set[int]:
        """Until it has judged; the ranks that are to be ended."""
        found = set(self.deaths.look(self.exits))
        time.sleep(0.03)
        return found | set(self.deaths.look(self.exits))

    def settle(self) -> None:
        for _ in range(6):
            self.board.settle(self.board.num_deaths())


GRID = RankGrid({"pipeline": 1, "data": 3, "sequence": 1, "tensor": 2}, {"data": ("data",), "tensor": ("tensor",)})


@pytest.fixture
def launcher(monkeypatch: pytest.MonkeyPatch) -> Launcher:
    made = Launcher(Store(), range(6), monkeypatch)
    for _ in range(6):
        made.board.begin()
    return made


def test_the_partners_are_ended_and_the_culprit_is_named(launcher: Launcher) -> None:
    launcher.see(2, RAISED, "communication")  # a victim, seen first
    launcher.see(3, KILLED)
    assert launcher.look() == set()  # both have ended
    assert launcher.deaths.lost == {2, 3}
    (loss,) = launcher.deaths.losses
    assert loss.reason.startswith("replica 1 died: rank 3 (data 1, tensor 1) was killed by SIGKILL")
    assert launcher.deaths.verdict is None
    assert not launcher.deaths.is_suspicious


def test_partners_that_hang_are_ended(launcher: Launcher) -> None:
    launcher.see(0, RAISED, "error")
    assert launcher.look() == {1}


def test_a_second_death_is_allowed_once_the_first_is_settled(launcher: Launcher) -> None:
    launcher.see(0, KILLED)
    launcher.look()
    launcher.see(1, KILLED)
    launcher.settle()
    launcher.see(4, KILLED)
    assert launcher.look() == {5}
    assert launcher.deaths.verdict is None
    launcher.settle()
    launcher.see(2, KILLED)
    launcher.look()
    assert "no other replica is left" in str(launcher.deaths.verdict)


def test_a_second_death_before_that_ends_the_run(launcher: Launcher) -> None:
    launcher.see(0, KILLED)
    launcher.look()
    launcher.see(4, RAISED, "communication")  # of a collective that the first was in
    launcher.see(5, KILLED)
    launcher.look()
    assert "replica 2 failed before all others had gone on without replica 0" in str(launcher.deaths.verdict)


def test_of_those_that_need_nobody_as_many_may_die_as_leave_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    launcher = Launcher(Store(), range(6), monkeypatch, are_independent=True)
    for _ in range(6):
        launcher.board.begin()
    launcher.see(0, KILLED)
    assert launcher.look() == {1}
    launcher.see(1, KILLED)
    launcher.see(4, RAISED, "error")  # before anybody goes on without the first
    assert launcher.look() == {5}
    assert launcher.deaths.verdict is None
    said = capsys.readouterr().err.splitlines()
    assert [line.partition(" died: ")[0] for line in said] == ["colossus: replica 0", "colossus: replica 2"]
    assert all(line.endswith("; the others go on") for line in said)
    launcher.see(5, KILLED)
    launcher.see(2, KILLED)
    launcher.look()
    assert "no other replica is left" in str(launcher.deaths.verdict)


def test_what_all_have_ends_the_run(launcher: Launcher) -> None:
    launcher.see(0, RankExit(2), "config")
    launcher.look()
    assert "a mistake in the config" in str(launcher.deaths.verdict)


def test_the_same_error_on_another_replica_ends_the_run(launcher: Launcher) -> None:
    launcher.see(0, RAISED, "error", "the data ended")
    launcher.look()
    launcher.settle()
    launcher.see(2, RAISED, "error", "the data ended")
    launcher.look()
    assert "the same error as a replica before" in str(launcher.deaths.verdict)


def test_two_at_the_same_time_end_the_run(launcher: Launcher) -> None:
    launcher.see(0, KILLED)
    launcher.see(2, KILLED)
    launcher.look()
    assert "replicas 0, 1 failed at the same time" in str(launcher.deaths.verdict)


def test_a_death_that_broke_what_others_did_together_is_told_as_such(launcher: Launcher) -> None:
    for rank in (0, 1, 4, 5):  # they are victims, and did not die
        launcher.see(rank, RAISED, "communication")
    launcher.see(2, KILLED)
    launcher.see(3, RAISED, "communication")
    launcher.look()
    assert str(launcher.deaths.verdict) == (
        "replica 1 died in the midst of an evaluation, a checkpoint or a sum over all replicas, and what replicas 0, 2 "
        "did together with it broke off"
    )
    assert launcher.board.num_deaths() == 0


def test_victims_that_fail_after_the_death_was_posted_are_told_as_such(launcher: Launcher) -> None:
    launcher.see(2, KILLED)
    launcher.look()
    launcher.see(0, RAISED, "communication")
    launcher.look()
    assert "replica 1 died in the midst of an evaluation" in str(launcher.deaths.verdict)


def test_a_rank_that_dies_while_the_others_stop_is_a_death(launcher: Launcher) -> None:
    launcher.deaths.is_stopping = True
    for rank in (0, 1, 4):
        launcher.see(rank, RankExit(143, after_stop=rank > 0))
    launcher.see(2, RankExit(-9, is_finished=False))
    assert launcher.look() == {3}
    assert launcher.deaths.lost == {2, 3}
    launcher.see(5, RankExit(143, after_stop=True, is_finished=False))  # it had to be ended
    launcher.look()
    assert launcher.deaths.verdict is not None


def test_a_victim_alone_ends_the_run(launcher: Launcher) -> None:
    launcher.see(0, RAISED, "communication")
    launcher.look()
    assert "rank 0 could not go on" in str(launcher.deaths.verdict)


def test_a_death_before_the_first_step_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = Launcher(Store(), range(6), monkeypatch)
    launcher.see(0, KILLED)
    launcher.look()
    assert "not all ranks had trained a step" in str(launcher.deaths.verdict)


def test_nodes_hear_of_each_others_deaths(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replica 1 lies on both; a node of victims hears of the culprit, and one whose replica died is no failure."""
    store = Store()
    one, other = Launcher(store, range(3), monkeypatch), Launcher(store, range(3, 6), monkeypatch)
    for _ in range(6):
        one.board.begin()
    other.see(3, RAISED, "communication")
    other.look()
    assert other.deaths.verdict is None
    one.see(2, KILLED)
    one.look()
    other.look()
    assert one.deaths.lost == other.deaths.lost == {2, 3}
    assert other.deaths.verdict is None
    end = NodeEnd(1, "host", {3: RAISED, 4: GOOD}, lost=[2, 3])
    assert NodeEnd.from_json(end.to_json()).is_good
    assert not NodeEnd(1, "host", {3: RAISED, 4: GOOD}).is_good


def test_a_node_that_is_gone_takes_its_replicas_along(launcher: Launcher) -> None:
    launcher.deaths._here = [0, 1]
    launcher.deaths.look({}, [("node 1 (host b; ranks 2, 3)", [2, 3])])
    assert launcher.deaths.lost == {2, 3}
    assert "node 1 (host b; ranks 2, 3), which gives no sign of life" in launcher.deaths.losses[0].reason


def test_a_node_that_is_gone_is_not_waited_for_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "SILENCE_AFTER_END_SECONDS", 0.1)
    store = Store()
    store.set("colossus/node/1", json.dumps({"host": "other", "ranks": [2, 3], "address": "127.0.0.1"}))
    one = Nodes(store, 0, 2, [0, 1], "127.0.0.1")
    one.forgive({2, 3})
    ends = threading.Thread(target=one.conclude, args=(NodeEnd(0, "host", {0: GOOD, 1: GOOD}),), daemon=True)
    ends.start()
    ends.join(10.0)
    assert not ends.is_alive()
    assert not one.has_trouble()
    one.close(holds_store=True)


def test_the_report_has_the_numbers() -> None:
    row = {"replicas": [1], "ranks": [1], "reason": "replica 1 died: rank 1 was killed"}
    full = {**row, "first_step_without": 12, "graph": "ring", "push_sum_weight": 1.25}
    assert deaths.report([full], 8, 20) == (
        "colossus: replica 1 died: rank 1 was killed; the others went on without it from step 12 (graph: ring), 72 "
        "samples of its share were not trained on, push-sum weight 1.25 was renounced"
    )
    nothing = {**row, "first_step_without": None, "push_sum_weight": None}
    assert "had nothing left to do together" in deaths.report([nothing], 8, 20)


def test_who_lost_a_peer_is_a_victim() -> None:
    gone = RuntimeError("rank 2 (replica 2) has gone: its connection was closed")
    wrapped = RuntimeError("replica 2 has died")
    wrapped.__cause__ = gone
    silent = RuntimeError("timeout: rank 2 (replica 2) did not send its message 7 within 20 s")
    assert [failure.kind_of(error) for error in (gone, wrapped, silent)] == ["communication"] * 3
