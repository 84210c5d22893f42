"""One process without parallelism: colossus against the plain torch loop that also clips and reads the loss.

    python -m benchmarks.serial

The plain loop runs twice, so that the noise (the same code against itself) stands beside the figure; with it comes the
peak of the tensor bytes of both.
"""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks import train_step


def main(argv: Sequence[str] | None = None) -> int:
    arguments = train_step.make_parser(__doc__, blocks=30).parse_args(argv)
    return train_step.run(arguments, ["serial", "colossus", "serial"], title="one process: ")


if __name__ == "__main__":
    raise SystemExit(main())
