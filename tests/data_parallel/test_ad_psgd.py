"""AD-PSGD: every replica's trajectory against a replay of the recorded order of pairs, and who waits for whom."""

from __future__ import annotations

import copy
import time
from collections import Counter, deque
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from helpers.gossip import ADAMW, SGD, Net, _flat, _unflat, classify, loss_of, part_of, settings_of, start
from helpers.ranks import run_ranks
from torch import Tensor, nn

import colossus
from colossus.data_parallel.parameter_vector import ParameterVector
from colossus.engine.engine import Engine
from colossus.state.model_state_dict import full_state_dict

STEPS = 15
Record = list[tuple[Any, ...]]


@dataclass
class Run:
    """Of a rank, by step: the whole parameters of its replica, in float64; the record; what is reported."""

    states: list[dict[str, Tensor]] = field(default_factory=list)
    record: Record = field(default_factory=list)
    reports: list[dict[str, float]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    owners: list[int | None] = field(default_factory=list)
    before_the_end: Record = field(default_factory=list)


def train(settings: dict[str, Any], model: Any, sleeps: bool = False) -> Run:
    engine = colossus.initialize(settings, model=model, loss_fn=classify)
    run, group = Run(), engine.context.group("data")
    run.record = engine.strategy.record = []
    for step in range(STEPS):
        if sleeps:
            sleep(engine, group.index, step)
        elif (step + group.index) % 4 == 0:
            time.sleep(0.004)
        result = engine.train_step(part_of(step, group.index))
        run.losses.append(result.loss)
        run.owners.append(result.replica)
        run.states.append(full_state_dict(engine.model, engine.context))
        run.reports.append(engine.strategy.report())
    run.before_the_end = list(run.record)
    engine.strategy.sync_point()
    run.states.append(full_state_dict(engine.model, engine.context))
    engine.close()
    return run


#: replica -> (before which step it sleeps, after how many steps of the others it wakes)
SLEEPS = {1: (2, 6), 0: (7, 11)}


def sleep(engine: Engine, replica: int, step: int) -> None:
    store = engine.context.store()
    store.set(f"began/{replica}/{step}", "")
    if replica in SLEEPS and step == SLEEPS[replica][0]:
        record, keys = (
            engine.strategy.record,
            [f"began/{other}/{SLEEPS[replica][1]}" for other in {0, 1, 2, 3} - {replica}],
        )
        number = len(record)
        while not store.check(keys) or (replica == 1 and not any(event[0] == "answer" for event in record[number:])):
            time.sleep(0.005)
        record.append(("awake",))


STRATEGY = dict(type="ad-psgd", log_every=6)
CASES: dict[str, Any] = {
    "sgd": (settings_of(STRATEGY, 4, SGD, clip_grad_norm=0.4), Net),
    "adamw": (settings_of(STRATEGY, 4, ADAMW), Net),
    "asleep": (settings_of(dict(type="ad-psgd"), 4, SGD), Net, True),
}


@cache
def runs() -> dict[str, list[Run]]:
    by_rank = run_ranks(4, lambda rank: [train(*case) for case in CASES.values()], with_context=False)
    return {name: [of_rank[number] for of_rank in by_rank] for number, name in enumerate(CASES)}


def replay(model: nn.Module, records: list[Record], optimizer: dict[str, Any], clip: float | None) -> list[list[Any]]:
    """The replicas' parameters after each step, and after the last sync point: gradients and updates by plain torch."""
    replicas = range(len(records))
    models = [copy.deepcopy(model) for _ in replicas]
    params = [[param for param in replica.parameters() if param.requires_grad] for replica in models]
    options = {name: value for name, value in optimizer.items() if name != "type"}
    optimizers = [getattr(torch.optim, optimizer["type"])(of, **options) for of in params]
    x = [_flat(of) for of in params]
    now, promised = copy.deepcopy(x), [np.zeros_like(vector) for vector in x]
    sent: dict[tuple[int, int], np.ndarray] = {}
    answers: dict[tuple[int, int], np.ndarray] = {}
    histories: list[list[Any]] = [[] for _ in replicas]

    def play(me: int, kind: str, *what: int) -> bool:
        """One event, if what it needs has happened."""
        if kind == "step":
            if what[0] > 1:
                histories[me].append(x[me].copy())
            _unflat(x[me], params[me])
            total, count = loss_of(models[me], what[0] - 1, me)
            optimizers[me].zero_grad()
            (total / count).backward()
            torch.nn.utils.clip_grad_norm_(params[me], clip or float("inf"))
            optimizers[me].step()
            x[me] = _flat(params[me])
        elif kind == "begin":
            sent[me, what[1]] = x[me].copy()
        elif kind == "answer":
            if what not in sent:
                return False
            d = (sent.pop((what[0], what[1])) - now[me]) / 2
            now[me], promised[me] = now[me] + d, promised[me] + d
            answers[what[0], what[1]] = d
        elif kind == "apply":
            if (me, what[1]) not in answers:
                return False
            x[me] = x[me] - answers.pop((me, what[1]))
        elif kind == "boundary":
            x[me] = x[me] + promised[me]
            now[me], promised[me] = x[me], np.zeros_like(x[me])
        return True

    todo = [deque(record) for record in records]
    while any(todo):
        moved = False
        for me in replicas:
            while todo[me] and play(me, *todo[me][0]):
                todo[me].popleft()
                moved = True
        assert moved, "the records are of no order in which things can happen"
    assert not sent
    assert not answers
    for me in replicas:
        histories[me].append(x[me])
    return histories


def trained(state: dict[str, Tensor], model: nn.Module) -> np.ndarray:
    return _flat([state[name] for name, param in model.named_parameters() if param.requires_grad])


@pytest.mark.parametrize("case", CASES)
def test_every_replica_is_the_replay_of_the_recorded_pairs(case: str) -> None:
    of_all, settings, model = runs()[case], CASES[case][0], start()
    records = [run.record for run in of_all]
    optimizer, clip = settings["optimizer"], settings["train"]["clip_grad_norm"]
    wanted = replay(model, records, optimizer, clip)
    for index, run in enumerate(of_all):
        states = [trained(state, model) for state in run.states]
        # the state after a step is seen before what a sync point adds after it: compared at the beginning of the next
        np.testing.assert_allclose(states[-1], wanted[index][-1], rtol=1e-10, atol=1e-10)
        for step in range(STEPS - 1):
            np.testing.assert_allclose(states[step], wanted[index][step], rtol=1e-10, atol=1e-10)
    kinds = Counter(event[0] for record in records for event in record)
    least = STEPS // 2 if case != "asleep" else 2  # how many meet while others sleep is a matter of time
    assert kinds["begin"] == kinds["answer"] == kinds["apply"] > least
    one, other = wanted[:2]
    assert max(np.abs(x - y).max() for x, y in zip(one, other, strict=True)) > 1e-4  # replicas differ


def test_the_others_go_on_and_mix_while_one_sleeps() -> None:
    """The sleeper wakes when the others have begun a later step, and it has answered if it is a passive one: who waited
    for it would wait for ever."""
    of_all = runs()["asleep"]
    for sleeper, (step, until) in SLEEPS.items():
        record = of_all[sleeper].record
        assert record.index(("step", step)) < record.index(("awake",)) < record.index(("step", step + 1))
        for other in {0, 1, 2, 3} - {sleeper}:
            mine = of_all[other].record
            slept = mine[mine.index(("step", step + 1)) : mine.index(("step", until))]
            assert [event[1] for event in slept if event[0] == "step"] == list(range(step + 1, until))


def test_numbers_are_a_replicas_own_but_at_sync_points() -> None:
    of_all = runs()["sgd"]
    for step in range(STEPS):
        meets = (step + 1) % 6 == 0
        assert [run.owners[step] for run in of_all] == ([None] * 4 if meets else [0, 1, 2, 3])
        assert (len({run.losses[step] for run in of_all}) == 1) == meets
    nbytes = ParameterVector([param for param in start().parameters() if param.requires_grad]).nbytes
    for index, run in enumerate(of_all):
        kinds = [event[0] for event in run.before_the_end]
        sent = sum(report["peer_bytes_sent"] for report in run.reports)
        if index % 2:
            boundaries = [number for number, kind in enumerate(kinds) if kind == "boundary"]
            applied = kinds[: boundaries[-1]].count("answer")
            assert sent % nbytes == 0 < sent
        else:
            applied = kinds.count("apply")
            assert sent == kinds.count("begin") * nbytes
        assert sum(report["exchanges"] for report in run.reports) == applied > 0
        assert all(("staleness" in report) == bool(report["exchanges"]) for report in run.reports)
        assert all(report.get("staleness", 0) >= 0 for report in run.reports)
        assert all(report["peer_wait_seconds"] >= 0 for report in run.reports)
