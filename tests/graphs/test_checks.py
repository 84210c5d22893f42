"""What is refused before a process starts, with the row or column and its sum; what a user's own graph may be."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from colossus.config import ConfigError, load_config
from colossus.graphs.graph import make_graph

HALVES = [[0.5, 0.5], [0.5, 0.5]]


def alternating(replicas: int, step: int) -> np.ndarray:
    return np.eye(replicas) if step % 2 else np.full((replicas, replicas), 1 / replicas)


def moody(replicas: int, step: int) -> np.ndarray:
    return np.eye(replicas)[np.random.default_rng().permutation(replicas)]


def edges(replicas: int, step: int, peers: int, shift: int = 0) -> dict[tuple[int, int], float]:
    share = 1 / (peers + 1)
    return {(i, (i + hop + shift) % replicas): share for i in range(replicas) for hop in range(peers + 1)}


def raising(replicas: int, step: int) -> Any:
    raise KeyError("host")


def wrong_shape(replicas: int, step: int) -> Any:
    return [[1.0]]


def outside(replicas: int, step: int) -> Any:
    return {(0, replicas): 1.0}


def lines(data: int, type: str = "sgp", tensor: int = 1, **options: Any) -> list[str]:
    """What is wrong with a strategy's options, before any other check of the config."""
    parallel = {"data": data, "tensor": tensor, "strategy": {"type": type, **options}}
    config = {"parallel": parallel, "train": {"global_batch_size": data}}
    try:
        load_config(config)
    except ConfigError as error:
        return [problem.removeprefix("parallel.strategy.") for problem in error.problems]
    return []


IRREGULAR = [[0.5, 0.2, 0.25], [0.5, 0.6, 0], [0, 0.2, 0.75]]
PARTS = np.kron(np.eye(2), HALVES)

REFUSED: list[tuple[int, dict[str, Any], str]] = [
    # names and options
    (4, {"graph": "expo"}, "graph: no graph of replicas named 'expo'. Did you mean 'exponential'?"),
    (4, {"graf": "ring"}, "graf: no such key; did you mean parallel.strategy.graph?"),
    (4, {"graph": {"type": "torus", "row": 2}}, "graph: graph.row: no such key; did you mean graph.rows?"),
    (4, {"graph": {"per_host": 2}}, "graph: a graph needs a type"),
    (4, {"graph": 3}, "graph: must be a name (bipartite_exponential, complete,"),
    (4, {"overlap": -1}, "overlap: must be at least 0, got -1"),
    # numbers that do not fit
    (4, {"peers": 4}, "graph = 'exponential' with data 4: peers = 4: with 4 replicas it must be 1 to 3"),
    (4, {"peers": 3, "graph": "linear"}, "graph = 'linear' with data 4: peers = 3: with 4 replicas it must be 1 to 2"),
    (4, {"peers": 2, "graph": "ring"}, "graph = 'ring' with data 4: peers = 2: this graph determines to whom"),
    (
        5,
        {"graph": "bipartite_exponential"},
        "graph = 'bipartite_exponential' with data 5: pairs odd replicas with even ones, so their number must be even, "
        "got 5 (odd: 2, even: 3)",
    ),
    (7, {"graph": "torus"}, "graph = 'torus' with data 7: 7 replicas form no grid of at least 2 x 2"),
    (
        12,
        {"graph": {"type": "torus", "rows": 5}},
        "graph = 'torus' with data 12: rows = 5: 12 replicas form no grid of 5 x 2 or more; rows can be one of "
        "[2, 3, 4, 6]",
    ),
    (
        4,
        {"graph": {"type": "hierarchical", "per_host": 3}},
        "graph = 'hierarchical' with data 4: per_host = 3: 4 replicas are not two or more hosts of 3",
    ),
    (
        6,
        {"graph": {"type": "hierarchical", "per_host": 2, "between": "bipartite_exponential"}},
        "graph = 'hierarchical' with data 6: between 3 hosts: pairs odd replicas with even ones",
    ),
    # matrices
    (
        3,
        {"graph": np.array(IRREGULAR).T},
        "graph with data 3: column 0 sums to 0.95, not 1; all rows do: is it transposed?",
    ),
    (2, {"graph": [[1.5, 0.5], [-0.5, 0.5]]}, "graph with data 2: row 1, column 0: the weight is -0.5"),
    (2, {"graph": [[float("nan"), 0.5], [0.5, 0.5]]}, "graph with data 2: row 0, column 0: the weight is nan"),
    (2, {"graph": [HALVES, [[1, 1], [0, 0]]]}, "graph with data 2: matrix of step 1: row 1 sums to 0: replica 1 keeps"),
    (2, {"graph": [[0, 1], [1, 0]], "overlap": 1}, "graph with data 2: replica 0 keeps nothing, so with overlap = 1"),
    (4, {"graph": PARTS}, "graph with data 4: it is not connected: replica 0 never reaches replica 2"),
    (2, {"graph": [[0.5, 0], [0.5, 1]]}, "graph with data 2: it is not connected: replica 1 never reaches replica"),
    (4, {"graph": HALVES}, "graph with data 4: its matrices are 2 x 2, but there are 4 replicas"),
    (4, {"graph": [[1, 2], [3]]}, "graph: a matrix is n rows of n numbers; these are not"),
    # functions
    (4, {"graph": alternating}, "graph = 'alternating' with data 4: alternating: its matrices of steps 0 and 1 differ"),
    (4, {"graph": {"type": alternating, "period": 0}}, "graph: alternating: period = 0: a whole number of at least 1"),
    (9, {"graph": moody}, "graph = 'moody' with data 9: moody: its matrices of steps 0 and 1 differ"),
    (4, {"graph": raising}, "graph = 'raising' with data 4: raising(replicas=4, step=0): KeyError: 'host'"),
    (4, {"graph": wrong_shape}, "graph = 'wrong_shape' with data 4: wrong_shape(replicas=4, step=0) must return 4 r"),
    (4, {"graph": outside}, "graph = 'outside' with data 4: outside(replicas=4, step=0): ValueError: edge (0, 4)"),
]


@pytest.mark.parametrize(("data", "options", "expected"), REFUSED, ids=[text[:60] for _, _, text in REFUSED])
def test_refused(data: int, options: dict[str, Any], expected: str) -> None:
    (line,) = lines(data, **options)
    assert line.startswith(expected), line


def test_right() -> None:
    for options in [
        {"graph": IRREGULAR},
        {"graph": [np.array(IRREGULAR), np.full((3, 3), 1 / 3)], "overlap": 3},
        {"graph": [[[0, 0, 1], [1, 0, 0], [0, 1, 0]]]},  # nothing is kept, but nothing travels either
        {"graph": {"type": alternating, "period": 2}},
        {"graph": edges, "peers": 2},
        {"graph": {"type": edges, "shift": 1}},
        {"graph": "star", "log_every": 5},
    ]:
        assert lines(3, **options) == [], options


def test_what_algorithms_need() -> None:
    (line,) = lines(3, "d-psgd", graph=IRREGULAR)
    assert line.startswith("graph with data 3: row 0 sums to 0.95, not 1; ")
    assert "sgp takes this graph" in line
    for kind, data, graph in (("d-psgd", 3, "star"), ("ad-psgd", 6, "ring"), ("ad-psgd", 5, "star")):
        assert lines(data, kind, graph=graph) == []
    for graph, data in (("ring", 5), ("complete", 4)):
        assert lines(data, "ad-psgd", graph=graph) == [
            f"graph = '{graph}' with data {data}: it is not bipartite: there is a cycle of odd length"
        ]


def test_what_ad_psgd_does_not_take() -> None:
    with pytest.raises(ConfigError, match=r"no such key; known keys of parallel.strategy: type, log_every, graph"):
        load_config({"parallel": {"data": 4, "strategy": {"type": "ad-psgd", "peers": 1}}})
    (line,) = lines(2, "ad-psgd", tensor=2)
    assert (
        line
        == "type = 'ad-psgd': a replica is one rank, but the plan is data 2 x tensor 2; 'sgp' and 'd-psgd' take "
        + ("replicas of several ranks")
    )


def test_data_1_takes_any_graph() -> None:
    for graph in ("bipartite_exponential", "torus", HALVES, {"type": "hierarchical", "per_host": 4}):
        assert lines(1, graph=graph, peers=7) == []


def test_function_and_its_edges() -> None:
    assert make_graph({"type": edges, "shift": 0}, 5, 1).at(0).targets(4) == [(0, 0.5)]
    assert make_graph({"type": edges, "shift": 0}, 5, 2).at(7).targets(3) == [(0, 1 / 3), (4, 1 / 3)]
    assert make_graph({"type": alternating, "period": 300}, 4).period == 300
