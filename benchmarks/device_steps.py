"""Steps of the real engine on H100s by the rules of streams and NCCL: what waits for collectives, without a device.

    python -m benchmarks.device_steps
    python -m benchmarks.device_steps --only "1D, tokens split" hierarchical

Nothing is measured. A rank of each plan runs the engine on tensors without values, and what it gives its device is
played with the durations of the data sheet (`colossus.planner.device_play`). The engine runs two models of few layers;
the step of all layers follows from them, since equal layers take equal times.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from benchmarks import common
from colossus.arithmetic import byte_count
from colossus.config import load_config
from colossus.context.grid import build_grid
from colossus.hardware.data_sheets import FromDataSheet
from colossus.hardware.host_placement import Placement
from colossus.planner.device_play import DevicePlayer
from colossus.planner.fake_step import fake_steps

LLAMA_8B = dict(
    type="Llama", num_layers=32, hidden_size=4096, num_heads=32, num_kv_heads=8, ffn_hidden_size=14336,
    vocab_size=128256, seq_len=8192, tie_embeddings=False,
)  # fmt: skip
LLAMA_70B = {**LLAMA_8B, "num_layers": 80, "hidden_size": 8192, "num_heads": 64, "ffn_hidden_size": 28672}
LLAMA_405B = {**LLAMA_70B, "num_layers": 126, "hidden_size": 16384, "num_heads": 128, "ffn_hidden_size": 53248}
MIXTRAL = dict(
    type="Llama", num_layers=56, hidden_size=6144, num_heads=48, num_kv_heads=8, ffn_hidden_size=16384,
    experts=dict(num=8, top_k=2), vocab_size=32768, seq_len=4096, tie_embeddings=False,
)  # fmt: skip
SPLIT = dict(size=8, sequence_sharded=True)
#: ranks of a host
PER_HOST = 8


@dataclass(frozen=True)
class Case:
    """A plan of a model.

    Attributes:
        parallel: the plan.
        model: options of the model.
        samples: samples of a microbatch on a data rank.
        microbatches: number of microbatches.
        more: further keys of the config.
    """

    parallel: dict[str, Any]
    model: dict[str, Any]
    samples: int = 1
    microbatches: int = 1
    more: dict[str, Any] | None = None

    def config(self, layers: int) -> dict[str, Any]:
        """Return the config with this number of layers."""
        batch = self.samples * self.microbatches * self.parallel.get("data", 1)
        own = {key: dict(value) for key, value in (self.more or {}).items()}
        return dict(
            parallel=self.parallel,
            model={**self.model, "num_layers": layers, **own.get("model", {})},
            data=dict(type="PythonStdlib"),
            optimizer=dict(type="AdamW", lr=1e-4),
            schedule=dict(microbatches=self.microbatches, **own.get("schedule", {})),
            train=dict(global_batch_size=batch, precision="bf16", steps=4, **own.get("train", {})),
        )


FULL = dict(train=dict(activation_checkpoint="full"))
CASES: dict[str, Case] = {
    "data 8": Case(dict(data=8), LLAMA_8B),
    "data 8, 4 microbatches": Case(dict(data=8), LLAMA_8B, microbatches=4),
    "ZeRO 1 on 8": Case(dict(data=8, zero=1), LLAMA_8B),
    "ZeRO 2 on 8, 4 microbatches": Case(dict(data=8, zero=2), LLAMA_8B, microbatches=4),
    "FSDP on 8": Case(dict(data=8, zero=3), LLAMA_8B),
    "FSDP on 8, all recomputed": Case(dict(data=8, zero=3), LLAMA_8B, more=FULL),
    "HSDP, 2 x 8": Case(dict(data=16, zero=dict(stage=3, shard=8)), LLAMA_8B),
    "hierarchical, 2 x 8": Case(dict(data=16, strategy=dict(type="hierarchical", per_host=8)), LLAMA_8B),
    "1D 8": Case(dict(tensor=8), LLAMA_8B),
    "1D 8, tokens split": Case(dict(tensor=SPLIT), LLAMA_8B),
    "1D 8, tokens split, all recomputed": Case(dict(tensor=SPLIT), LLAMA_8B, more=FULL),
    "2D 4": Case(dict(tensor=dict(mode="2d", size=4)), LLAMA_8B, samples=2),
    "2.5D 8": Case(dict(tensor=dict(mode="2.5d", size=8, depth=2)), LLAMA_8B, samples=4),
    "3D 8": Case(dict(tensor=dict(mode="3d", size=8)), LLAMA_8B, samples=4),
    "3D 8, 4 panels": Case(dict(tensor=dict(mode="3d", size=8, panels=4)), LLAMA_8B, samples=4),
    "ring 8": Case(dict(sequence=dict(size=8, mode="ring")), LLAMA_8B, more=dict(model=dict(seq_len=32768))),
    "Ulysses 8": Case(dict(sequence=dict(size=8, mode="ulysses")), LLAMA_8B, more=dict(model=dict(seq_len=32768))),
    "1F1B 4": Case(dict(pipeline=4), LLAMA_8B, microbatches=8),
    "ZB-H1 4": Case(dict(pipeline=4), LLAMA_8B, microbatches=8, more=dict(schedule=dict(type="zb-h1"))),
    "70B, 1D 8, tokens split": Case(dict(tensor=SPLIT), LLAMA_70B),
    "70B, 1D 8, tokens split, 4 panels": Case(dict(tensor=dict(**SPLIT, panels=4)), LLAMA_70B),
    "70B, FSDP 8 x 1D 8, tokens split": Case(dict(data=8, zero=3, tensor=SPLIT), LLAMA_70B, more=FULL),
    "405B, FSDP 64 x 1D 8, tokens split": Case(dict(data=64, zero=3, tensor=SPLIT), LLAMA_405B, samples=2, more=FULL),
    "Mixtral 8x22B, data 16, experts over 8": Case(dict(data=16, zero=1, expert=8), MIXTRAL),
}


@dataclass
class Row:
    """Seconds of a step, those in which collectives and messages are exposed on the busiest rank, and peak bytes."""

    seconds: float
    exposed: float
    peak: float


def play(case: Case, layers: int) -> Row:
    """Play the step of a model with this number of layers."""
    config = load_config(case.config(layers))
    grid = build_grid(config.parallel)
    steps = fake_steps(config)
    player = DevicePlayer(FromDataSheet("h100"), Placement(grid, max(1, grid.world_size // PER_HOST)))
    played = player.play({step.rank: step.events for step in steps}).values()
    busiest = max(played, key=lambda step: step.busy)
    return Row(busiest.seconds, sum(busiest.exposed.values()), max(step.peak for step in steps))


def of_all_layers(case: Case) -> Row:
    """Return the row of the whole model from two of fewer layers, which are as many as a prefetch reaches."""
    stages = case.parallel.get("pipeline", 1)
    few, more = (play(case, stages * number) for number in (3, 4))
    times = case.model["num_layers"] / stages - 3
    return Row(*(low + times * (high - low) for low, high in zip(vars(few).values(), vars(more).values(), strict=True)))


def main() -> None:
    parser = common.make_parser(__doc__)
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="cases whose name contains one of these")
    arguments = parser.parse_args()
    names = [name for name in CASES if not arguments.only or any(part in name for part in arguments.only)]
    rows = {}
    began = time.perf_counter()
    for name in names[: 1 if arguments.smoke else None]:
        rows[name] = of_all_layers(CASES[name])
    common.print_table(
        f"Llama 3 8B where no other model is named, bf16, H100 by data sheet, hosts of {PER_HOST}",
        ("plan", "step", "exposed", "peak"),
        [
            (name, f"{row.seconds:.3f} s", f"{row.exposed / row.seconds:.1%}", byte_count(row.peak))
            for name, row in rows.items()
        ],
    )
    print(f"\nplayed in {time.perf_counter() - began:.0f} s")
    common.write_json(arguments.json, {name: vars(row) for name, row in rows.items()})


if __name__ == "__main__":
    main()
