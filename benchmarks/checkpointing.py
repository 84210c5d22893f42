"""Activation checkpointing in one process: time and memory of a step beside none, and beside torch's own.

    python -m benchmarks.checkpointing

``serial-full`` and ``serial-selective`` are `torch.utils.checkpoint` around each block of the plain model. All cases
train the same: losses and gradient norms are compared before the clock starts.
"""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks import train_step
from benchmarks.cases import RECOMPUTING


def main(argv: Sequence[str] | None = None) -> int:
    arguments = train_step.make_parser(__doc__, blocks=10).parse_args(argv)
    return train_step.run(arguments, ["serial", "serial", "colossus", *RECOMPUTING], title="one process: ")


if __name__ == "__main__":
    raise SystemExit(main())
