"""One server's store: whatever is asked, it answers and goes on; what it keeps for whom."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.servers import local_servers, made, pulled
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from colossus.server.frames import Request
from colossus.server.store import ShardStore

OPS = [
    *("create", "free", "push", "pull", "accumulate", "squares", "apply", "clock", "dump"),
    *("load", "waiting_for", "none of these"),
]
VALUES: st.SearchStrategy[Any] = st.one_of(
    st.none(),
    st.integers(-3, 5),
    st.sampled_from(["w", "rows", "dense", "none", "add", "gradient"]),
    st.just(["w"]),
    st.just(["rows"]),
    st.just(["dense"]),
    st.just([{}]),
    st.just([{"lr": 1.0}]),
    st.just([None]),
    st.just([[0, 9]]),
    st.just([0, 1]),
    st.just([{"name": "w", "start": 7, "keys": ["value", "sum"], "scalars": {}}]),
)
FIELDS = [
    *("names", "kinds", "rule", "options", "bases", "step", "workers", "found_inf", "pull"),
    *("max_staleness", "bounds", "tensors", "specs", "has_values", "source"),
]
ARRAYS = st.lists(
    st.sampled_from(
        [torch.ones(4), torch.tensor([0, 1]), torch.tensor([9]), torch.ones(2), torch.ones(()), torch.ones(0)]
    ),
    max_size=3,
)


class Asked:
    """Requests to a store, and what it has answered."""

    def __init__(self) -> None:
        self.store = ShardStore()
        self.answers: list[tuple[dict[str, Any] | None, str | None]] = []

    def ask(self, op: str, header: dict[str, Any], arrays: list[Tensor] | None = None, worker: int = 0) -> None:
        request = Request(
            worker, op, header, arrays or [], lambda told, _: self.answers.append((told.get("h"), told.get("e")))
        )
        self.store.handle(request)


@settings(deadline=None, max_examples=80)
@given(
    asked=st.lists(
        st.tuples(st.sampled_from(OPS), st.dictionaries(st.sampled_from(FIELDS), VALUES), ARRAYS),
        min_size=1,
        max_size=5,
    )
)
def test_no_request_ends_a_server(asked: list[tuple[str, dict[str, Any], list[Tensor]]]) -> None:
    """Each is answered once, or waits; the store goes on, and so does a tensor of right shape and dtype."""
    asking = Asked()
    spec = dict(name="w", shape=[4], dtype="float32", start=0, stop=4, optimizer={"type": "adagrad", "lr": 0.1})
    asking.ask("create", {"specs": [spec], "has_values": True, "source": 1, "workers": [1]}, [torch.zeros(4)], 1)
    for op, header, arrays in asked:
        asking.ask(op, header, arrays)
    asking.store.on_gone(0, "it was odd")
    before = len(asking.answers)
    asking.ask("pull", {"names": ["w"], "kinds": ["dense"]}, worker=1)
    reply, error = asking.answers[before]
    assert error is None
    assert reply is not None
    assert len(reply["versions"]) == 1
    assert len(asking.answers) <= len(asked) + 2


def test_what_is_refused_is_said() -> None:
    asking = Asked()
    asking.ask("steal", {})
    asking.ask("pull", {"names": ["w"], "kinds": ["dense"]})
    asking.ask("pull", {})
    errors = [error for _, error in asking.answers]
    assert errors[0] is not None
    assert errors[0].startswith("there is no 'steal'; there are create, free, push")
    assert errors[1:] == ["there is no tensor 'w': it was not made, or was freed", "pull: KeyError: 'names'"]


def test_a_refused_push_of_several_tensors_changes_none() -> None:
    with local_servers(1) as [worker]:
        made([worker], {"a": torch.zeros(3), "b": torch.zeros(2, dtype=torch.int64)})
        with pytest.raises(RuntimeError, match=r"'b' is torch\.int64"):
            worker.push({"a": torch.ones(3), "b": torch.ones(2)}).wait()
        assert pulled(worker, "a", torch.ones(3)).tolist() == [0.0, 0.0, 0.0]


REFUSED_OPTIONS: dict[str, tuple[str, dict[str, Any], str]] = {
    "another word": ("gradient", {"learning_rate": 3.0}, "'w' by 'sgd' has no option 'learning_rate'; it has lr, "),
    "a slip": ("gradient", {"lr": 0.5, "lrr": 3.0}, "has no option 'lrr'.*scale, clip_value"),
    "of another optimizer": ("gradient", {"lr": 0.5, "betas": [0.9, 0.99]}, "by 'sgd' has no option 'betas'"),
    "uphill": ("gradient", {"lr": -1.0}, r"'w' with lr = -1\.0; it is a number, at least 0"),
    "no number": ("gradient", {"lr": float("nan")}, "lr = nan"),
    "endless": ("gradient", {"lr": float("inf")}, "lr = inf"),
    "words": ("gradient", {"lr": "1.0"}, "lr = '1.0'"),
    "none": ("gradient", {}, "'w' has no lr, and none was given"),
    "none, though scaled": ("gradient", {"lr": None, "scale": 0.5}, "'w' has no lr, and none was given"),
    "added": ("add", {"lr": 0.1}, "add of 'w' takes no options, and lr was given"),
    "copied": ("copy", {"scale": 0.5}, "copy of 'w' takes no options, and scale was given"),
}


def test_options_that_would_be_ignored_are_refused() -> None:
    with local_servers(2) as [worker]:
        made([worker], {"w": torch.zeros(4)}, optimizer=dict(type="sgd"))
        for rule, options, words in REFUSED_OPTIONS.values():
            with pytest.raises(RuntimeError, match=words):
                worker.push({"w": torch.ones(4)}, rule, options).wait()
            assert not pulled(worker, "w", torch.ones(4)).any(), options
        options = {"lr": 1, "weight_decay": 0.0, "scale": 0.5, "clip_value": 2.0}
        worker.push({"w": torch.full((4,), 6.0)}, "gradient", options).wait()
        assert pulled(worker, "w", torch.ones(4)).tolist() == [-2.0] * 4


def test_tensors_go_with_the_last_worker() -> None:
    asking = Asked()
    spec = dict(name="w", shape=[1], dtype="float32", start=0, stop=1, optimizer={})
    for worker in (0, 1):
        header = {"specs": [spec], "has_values": worker == 0, "source": 0, "workers": [0, 1]}
        asking.ask("create", header, [torch.zeros(1)] if worker == 0 else [], worker)
    pull = {"names": ["w"], "kinds": ["dense"]}
    asking.store.on_gone(0, "killed")
    asking.ask("pull", pull, worker=1)
    assert asking.answers[-1] == ({"versions": [0]}, None)
    asking.store.on_gone(1, "killed")
    asking.ask("pull", pull, worker=1)
    assert asking.answers[-1] == (None, "there is no tensor 'w': it was not made, or was freed")
