"""One process without parallelism: colossus against the plain torch loop that also clips and reads the loss.

    python -m benchmarks.serial
    python -m benchmarks.serial --precision bf16 --device cuda

The plain loop runs twice, so that the noise (the same code against itself) stands beside the figure; with it comes the
peak of the tensor bytes of both. In bf16 it runs under `torch.autocast`. On a GPU whose peak is known the share of it
that is reached (MFU) is printed, too; a GPU has not been at hand so far.
"""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks import train_step

NAMES = {"fp32": ["serial", "colossus", "serial"], "bf16": ["serial-bf16", "colossus-bf16", "serial-bf16"]}


def main(argv: Sequence[str] | None = None) -> int:
    parser = train_step.make_parser(__doc__, blocks=30)
    parser.add_argument("--precision", nargs="+", choices=list(NAMES), default=["fp32"], help="(default fp32)")
    parser.add_argument("--device", default="cpu", help="cpu (default) or cuda; memory is measured on the CPU only")
    arguments = parser.parse_args(argv)
    names = [name for precision in arguments.precision for name in NAMES[precision]]
    return train_step.run(arguments, names, title="one process: ", device=arguments.device)


if __name__ == "__main__":
    raise SystemExit(main())
