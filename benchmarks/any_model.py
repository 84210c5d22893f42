"""A step of transformers' Llama by `colossus.parallelize` beside our Llama, from one folder, 1D on two ranks.

    python -m benchmarks.any_model

``paired`` keeps features split between the linears of a pair, ``unpaired`` swaps every linear alone. Before the clock
starts the losses and gradient norms of all cases are those of our Llama.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import transformers

import colossus
from benchmarks import common
from benchmarks.common import Spread
from benchmarks.ranks import RankGroup
from benchmarks.train_step import CHECKED_STEPS, SMOKE, Worker, check, sizes
from benchmarks.workload import CLIP_NORM, LEARNING_RATE, Workload

RANKS = 2
REFERENCE = "ours"
#: name -> options of ``model = dict(type="hf", path=..)``
CASES: dict[str, dict[str, Any]] = {
    REFERENCE: {},
    "paired": dict(native=True),
    "unpaired": dict(native=True, rules={"*": "whole"}),
}


def make_folder(folder: Path, workload: Workload) -> None:
    """Write a Llama of random weights."""
    config = transformers.LlamaConfig(
        hidden_size=workload.hidden, num_hidden_layers=workload.layers, num_attention_heads=workload.heads,
        num_key_value_heads=workload.heads // 2, intermediate_size=8 * workload.hidden // 3 // 32 * 32,
        vocab_size=workload.vocab, max_position_embeddings=workload.tokens,
    )  # fmt: skip
    model: Any = transformers.LlamaForCausalLM(config)
    model.save_pretrained(folder)


class LlamaCase:
    """A `benchmarks.cases.Case`."""

    def __init__(self, folder: Path, options: dict[str, Any], workload: Workload, rank: int) -> None:
        self._engine = colossus.initialize(
            dict(
                parallel=dict(tensor=dict(mode="1d", size=RANKS)),
                model=dict(type="hf", path=str(folder), **options),
                optimizer=dict(type="AdamW", lr=LEARNING_RATE),
                train=dict(global_batch_size=workload.batch, clip_grad_norm=CLIP_NORM),
                device="cpu",
            )
        )
        self._batches = [dict(inputs=ids, labels=labels) for ids, labels in workload.batches()]

    def step(self, index: int) -> tuple[float, float]:
        result = self._engine.train_step(self._batches[index % len(self._batches)])
        return result.loss, result.grad_norm


def main(argv: Sequence[str] | None = None) -> int:
    parser = common.make_parser(__doc__, blocks=15)
    parser.add_argument("--hidden", type=int, default=512, help="hidden size (default %(default)s)")
    parser.add_argument("--steps-per-block", type=int, default=2, help="timed steps in a block (default %(default)s)")
    arguments = parser.parse_args(argv)
    workload = SMOKE if arguments.smoke else sizes(arguments.hidden)
    blocks = 2 if arguments.smoke else arguments.blocks
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory(prefix="colossus-benchmark-") as root, ExitStack() as stack:
        folder = Path(root)
        make_folder(folder, workload)
        groups = {}
        for label, name in common.unique_labels((REFERENCE, *CASES)).items():
            common.progress(f"building {label}")
            kind: Any = SimpleNamespace(build=partial(LlamaCase, folder, CASES[name]), precision="fp32")
            make = partial(Worker, kind, workload)
            groups[label] = stack.enter_context(RankGroup(label, RANKS, make))
        trajectories = {label: group.call("steps", CHECKED_STEPS)[0] for label, group in groups.items()}
        check(trajectories, REFERENCE)
        runners = {label: partial(group.slowest, "block", arguments.steps_per_block) for label, group in groups.items()}
        series = common.alternate(runners, blocks)
    ratios = {label: common.ratio(series, label, REFERENCE) for label in series}
    rows = [(label, f"{Spread.of(seconds).median * 1e3:.2f}", ratios[label]) for label, seconds in series.items()]
    common.print_table(f"Llama under 1D {RANKS}; {workload}; {blocks} blocks", ("case", "ms/step", "time / ours"), rows)
    common.write_json(
        arguments.json, {"workload": workload, "seconds_per_step": series, "time_over_ours": ratios,
                         "loss_and_norm": trajectories}
    )  # fmt: skip
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
