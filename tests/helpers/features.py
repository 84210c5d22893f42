"""The features that a training run combines, as named levels: what the law of parity is proven for, pair by pair.

`FACTORS` is the catalogue. `ARRAY` is a covering array over it: each pair of levels of two features that fits 8 ranks,
and that the config takes, is in one of its rows. `missing_pairs` checks that, and ``python -m helpers.features`` (in
tests/) makes the rows anew after a level has come or gone.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

from helpers.experts import KINDS
from helpers.training import config_of, merged

from colossus.config import ConfigError, load_config

Row = tuple[str, ...]
Pair = tuple[tuple[str, str], tuple[str, str]]
MOST_RANKS, STEPS, BATCH = 8, 2, 16


def _tensor(**options: Any) -> dict[str, Any]:
    return dict(parallel=dict(tensor=options))


def _pipeline(kind: str) -> dict[str, Any]:
    """Two stages: two microbatches make each take a forward and a backward in turn."""
    return dict(parallel=dict(pipeline=2), schedule=dict(type=kind, microbatches=2))


#: feature -> level -> what it adds to a config; the first level of each adds nothing
FACTORS: dict[str, dict[str, dict[str, Any]]] = {
    "tensor": {
        "whole": {},
        "1d": _tensor(size=2),
        "1d_sharded": _tensor(size=2, sequence_sharded=True),
        "2d": _tensor(mode="2d", size=4),
        "2d_2x1": _tensor(mode="2d", shape=(2, 1)),
        "2.5d": _tensor(mode="2.5d", size=2, depth=2),
        "3d": _tensor(mode="3d", shape=(2, 1, 2)),
        "3d_2x1x1": _tensor(mode="3d", shape=(2, 1, 1)),
    },
    "schedule": {
        "one": {},
        "accumulated": dict(schedule=dict(microbatches=2)),
        "1f1b": _pipeline("1f1b"),
        "interleaved": _pipeline("interleaved"),
        "zb-h1": _pipeline("zb-h1"),
        "zb-v": _pipeline("zb-v"),
    },
    "data": {
        "alone": {},
        "replicas": dict(parallel=dict(data=2)),
        "zero1": dict(parallel=dict(data=2, zero=1)),
        "zero2": dict(parallel=dict(data=2, zero=2)),
        "zero3": dict(parallel=dict(data=2, zero=3)),
    },
    "sequence": {
        "unsplit": {},
        "ring": dict(parallel=dict(sequence=dict(size=2, mode="ring"))),
        "ulysses": dict(parallel=dict(sequence=dict(size=2, mode="ulysses"))),
    },
    "weights": {
        "matmul": {},
        "keep": dict(parallel=dict(tensor=dict(weights="microbatch", gathered="keep"))),
        "step": dict(parallel=dict(tensor=dict(weights="step", panels=2))),
    },
    "recompute": {
        "none": {},
        "full": dict(train=dict(activation_checkpoint="full")),
        "selective": dict(train=dict(activation_checkpoint="selective")),
    },
    "precision": {
        "fp64": {},
        "fp32": dict(train=dict(precision="fp32")),
        "bf16": dict(train=dict(precision="bf16")),
    },
    "model": {
        "gpt": {},
        "llama_like": dict(
            model=dict(
                positions="rotary", norm="rmsnorm", mlp="swiglu", num_kv_heads=2, bias=False, tie_embeddings=False,
                ffn_hidden_size=44,
            )
        ),
        "loss_terms": dict(model=dict(label_smoothing=0.1, z_loss=1e-2)),
        "dropout": dict(model=dict(dropout=0.2)),
        "experts": dict(
            model=dict(mlp="tested_experts_with_bias", ffn_hidden_size=20, norm="rmsnorm", bias=False),
        ),
    },
    "optimizer": {
        "AdamW": {},
        "SGD": dict(optimizer=dict(type="SGD", lr=1e-2, momentum=0.9, weight_decay=0.01)),
    },
}  # fmt: skip
assert "experts_with_bias" in KINDS  # whose import registers that MLP


def config_of_row(row: Row) -> dict[str, Any]:
    """Return the config that a row describes."""
    parts: dict[str, Any] = {}
    for factor, level in zip(FACTORS, row, strict=True):
        parts = merged(parts, FACTORS[factor][level])
    plan, precision = dict(parts.pop("parallel", {})), parts.get("train", {}).pop("precision", "fp64")
    if "experts" in row and ("data" in plan or "sequence" in plan):
        plan["expert"] = 2
    optimizer = parts.pop("optimizer", {})
    parts["train"] = {**parts.get("train", {}), "global_batch_size": BATCH}
    config = config_of(plan, STEPS, precision, **parts)
    return {**config, "optimizer": optimizer or config["optimizer"]}


def reference_of_row(row: Row) -> dict[str, Any]:
    """Return the config of the same training in one process, in one piece."""
    trained = ("precision", "model", "optimizer")
    levels = zip(FACTORS, row, strict=True)
    return config_of_row(tuple(level if factor in trained else next(iter(FACTORS[factor])) for factor, level in levels))


def ranks_of_row(row: Row) -> int:
    """Return the number of ranks of a row's plan."""
    tensor = {"whole": 1, "2d": 4, "3d": 4}.get(row[0], 2)
    return int(tensor * 2 ** num_other_splits(row))


def num_other_splits(row: Row) -> int:
    """Return how many of pipeline, data and sequence are split in two."""
    _, schedule, data, sequence = row[:4]
    return (schedule not in ("one", "accumulated")) + (data != "alone") + (sequence != "unsplit")


@cache
def is_allowed(row: Row) -> bool:
    """Return whether a row fits `MOST_RANKS`, is accepted as a config, and can be compared."""
    if ranks_of_row(row) > MOST_RANKS:
        return False
    if row[0] in ("2d", "3d") and num_other_splits(row):  # beside these are modes of the same kind on two ranks
        return False
    if "experts" in row and "fp64" not in row:  # rounding may choose another expert
        return False
    if "bf16" in row and "AdamW" in row:  # whose first steps have the size of the rate, whatever the gradient's
        return False
    if row[0] == "whole" and row[4] != "matmul" and row[2] != "zero3":  # no weight is ever gathered
        return False
    try:
        load_config(config_of_row(row), (), ranks_of_row(row))
    except ConfigError:
        return False
    return True


_ROWS = """
whole accumulated alone unsplit matmul full fp32 gpt SGD
whole accumulated alone unsplit matmul none bf16 llama_like SGD
1d one alone unsplit keep full fp32 loss_terms AdamW
2.5d accumulated alone unsplit keep selective fp32 dropout SGD
3d_2x1x1 accumulated alone unsplit step full fp64 experts AdamW
whole 1f1b alone unsplit matmul none fp64 experts AdamW
whole accumulated replicas unsplit matmul none fp64 loss_terms SGD
whole zb-h1 alone unsplit matmul full fp64 llama_like SGD
whole zb-v alone unsplit matmul none fp64 loss_terms AdamW
1d accumulated alone ulysses step none fp64 loss_terms SGD
1d accumulated zero1 unsplit keep full fp64 loss_terms SGD
1d_sharded accumulated zero2 unsplit keep full fp32 gpt SGD
1d_sharded one alone ulysses step full fp64 dropout SGD
1d_sharded one zero3 unsplit matmul none fp64 loss_terms SGD
2.5d one zero2 unsplit step selective fp64 loss_terms AdamW
2.5d one zero3 unsplit matmul none fp64 llama_like SGD
2d accumulated alone unsplit keep selective fp64 gpt AdamW
2d accumulated alone unsplit step full fp64 experts AdamW
2d one alone unsplit keep selective fp64 llama_like SGD
2d one alone unsplit matmul none fp64 dropout AdamW
2d one alone unsplit step full fp32 loss_terms SGD
2d_2x1 accumulated zero2 unsplit step full fp64 experts AdamW
2d_2x1 interleaved alone unsplit keep selective fp64 loss_terms AdamW
2d_2x1 zb-h1 alone unsplit matmul none fp64 dropout AdamW
3d accumulated alone unsplit keep none fp32 gpt AdamW
3d accumulated alone unsplit matmul full fp64 experts SGD
3d accumulated alone unsplit step none fp64 dropout AdamW
3d one alone unsplit keep full fp64 loss_terms SGD
3d one alone unsplit step selective fp64 llama_like SGD
3d_2x1x1 1f1b alone unsplit step none fp64 loss_terms SGD
3d_2x1x1 accumulated zero3 unsplit matmul selective fp64 gpt AdamW
3d_2x1x1 one zero1 unsplit keep none fp32 llama_like SGD
whole 1f1b zero2 unsplit matmul full fp64 llama_like SGD
whole accumulated zero1 ring matmul full fp64 dropout AdamW
whole interleaved zero3 unsplit step full fp32 dropout AdamW
whole one zero2 ulysses matmul selective fp64 gpt AdamW
whole zb-h1 zero2 unsplit matmul selective fp64 loss_terms AdamW
whole zb-v zero3 unsplit keep none fp64 dropout SGD
1d 1f1b replicas unsplit keep selective fp32 dropout SGD
1d interleaved zero2 unsplit matmul none fp64 llama_like SGD
1d zb-h1 zero3 unsplit step selective fp64 experts SGD
1d zb-v alone ring keep full fp64 gpt SGD
1d_sharded 1f1b alone ring keep full fp64 llama_like AdamW
1d_sharded interleaved replicas unsplit keep selective fp64 gpt AdamW
1d_sharded zb-h1 zero1 unsplit keep full fp64 dropout AdamW
1d_sharded zb-v zero1 unsplit step selective fp64 experts AdamW
2.5d 1f1b zero1 unsplit step full fp64 gpt SGD
2.5d interleaved alone ulysses keep selective fp64 experts AdamW
2.5d zb-h1 alone ring step none fp32 loss_terms AdamW
2.5d zb-v replicas unsplit matmul none fp64 gpt AdamW
2d_2x1 1f1b replicas unsplit step full fp64 llama_like AdamW
2d_2x1 accumulated zero3 ring matmul none fp64 dropout SGD
2d_2x1 one zero1 ulysses keep full fp64 gpt SGD
2d_2x1 zb-v alone ulysses keep full fp32 llama_like SGD
3d_2x1x1 interleaved zero1 unsplit step none fp64 loss_terms SGD
3d_2x1x1 one replicas ring keep selective fp64 experts SGD
3d_2x1x1 zb-h1 alone ulysses step none fp64 gpt AdamW
3d_2x1x1 zb-v zero2 unsplit keep selective fp64 dropout AdamW
whole 1f1b zero3 ulysses step selective fp64 dropout SGD
whole interleaved zero2 ring matmul selective fp64 llama_like AdamW
whole zb-h1 replicas ulysses matmul none fp64 experts AdamW
"""
#: a level of each feature, in the order of `FACTORS`
ARRAY: list[Row] = [tuple(line.split()) for line in _ROWS.strip().splitlines()]


def all_pairs() -> Iterator[Pair]:
    """Yield each pair of levels of two features."""
    for one, other in itertools.combinations(FACTORS, 2):
        for pair in itertools.product(FACTORS[one], FACTORS[other]):
            yield (one, pair[0]), (other, pair[1])


def pairs_of(row: Row) -> set[Pair]:
    """Return the pairs of levels that a row combines."""
    return set(itertools.combinations(zip(FACTORS, row, strict=True), 2))


def completed(levels: dict[str, str]) -> Row:
    """Return the row of some levels, with the plainest level of every other feature."""
    return tuple(levels.get(factor, next(iter(of_factor))) for factor, of_factor in FACTORS.items())


#: the least that makes a level possible which nothing plain takes: weights that are gathered
_HELP: list[dict[str, str]] = [{}, dict(data="zero3"), dict(tensor="1d")]


def is_possible(pair: Pair) -> bool:
    """Return whether a pair is allowed, alone or where the least is added that makes it so."""
    levels = dict(pair)
    return any(is_allowed(completed(more | levels)) for more in _HELP)


def all_rows(**levels: str) -> Iterator[Row]:
    """Yield every allowed row that has these levels."""
    options = [[levels[factor]] if factor in levels else list(FACTORS[factor]) for factor in FACTORS]
    yield from filter(is_allowed, itertools.product(*options))


def missing_pairs(rows: Sequence[Row]) -> list[Pair]:
    """Return the possible pairs that no row has."""
    covered = set().union(*map(pairs_of, rows)) if rows else set()
    return [pair for pair in all_pairs() if pair not in covered and is_possible(pair)]


def make_array() -> list[Row]:
    """Return rows, greedily: of the rows grown from missing pairs the one that adds most pairs for its ranks."""
    open_pairs, rows, uses = set(missing_pairs([])), list[Row](), Counter[tuple[str, str]]()
    while open_pairs:
        pairs = sorted(open_pairs)
        grown = [_grown(dict(pair), open_pairs, uses) for pair in pairs[:: max(1, len(pairs) // 24)]]
        rows.append(max(grown, key=lambda row: len(pairs_of(row) & open_pairs) / (1 + ranks_of_row(row))))
        open_pairs -= pairs_of(rows[-1])
        uses.update(zip(FACTORS, rows[-1], strict=True))
    for row in sorted(rows, key=ranks_of_row, reverse=True):
        others = [other for other in rows if other != row]
        if not missing_pairs(others):
            rows = others
    return rows


def _grown(levels: dict[str, str], wanted: set[Pair], uses: Counter[tuple[str, str]]) -> Row:
    """Return an allowed row with these levels, and of each other feature the level that adds most pairs for its ranks.

    Among equals it is float64, which sees most, and what was used least.
    """
    levels = next(more | levels for more in _HELP if is_allowed(completed(more | levels)))
    for factor in sorted(FACTORS.keys() - levels.keys(), key=list(FACTORS).index):

        def value(option: dict[str, str], factor: str = factor) -> tuple[float, bool, int]:
            own = [(name, option[name]) for name in FACTORS if name in option]
            new = sum(pair in wanted for pair in itertools.combinations(own, 2))
            level = option[factor]
            return new / (1 + ranks_of_row(completed(option))), level == "fp64", -uses[factor, level]

        options = [{**levels, factor: level} for level in FACTORS[factor]]
        plainest = ranks_of_row(completed(levels))
        levels = max(
            (
                option
                for option in options
                if is_allowed(completed(option))
                and (ranks_of_row(completed(option)) == plainest or value(option)[0] > value(options[0])[0])
            ),
            key=value,
        )
    return completed(levels)


if __name__ == "__main__":
    made = sorted(make_array(), key=lambda row: (ranks_of_row(row), row))
    for made_row in made:
        print(" ".join(made_row))
    print(len(made), "rows", sum(map(ranks_of_row, made)), "ranks")
