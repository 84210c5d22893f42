"""One process without parallelism: colossus against the plain torch loop that also clips and reads the loss.

    python -m benchmarks.serial
    python -m benchmarks.serial --recompute      # activation checkpointing, beside none and beside torch's own
    python -m benchmarks.serial --device cuda --hidden 2048 256 --precision fp32 tf32 bf16 bf16-compiled

The plain loop runs twice, so that the noise (the same code against itself) stands beside the figure; with it comes the
peak of the tensor bytes of both. In bf16 the plain loop runs under `torch.autocast`; ``compiled`` compiles each block
of both. On a GPU nobody reads a loss while the clock runs, and the share of its peak that is reached (MFU) is printed
where the peak is known. With ``--recompute``, ``serial-full`` and ``serial-selective`` are `torch.utils.checkpoint`
around each block of the plain model. No GPU has been at hand so far.
"""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks import train_step
from benchmarks.cases import RECOMPUTING

PRECISIONS = ("fp32", "bf16", "tf32", "bf16-compiled", "tf32-compiled")


def names_of(precision: str) -> list[str]:
    suffix = "" if precision == "fp32" else f"-{precision}"
    return [f"serial{suffix}", f"colossus{suffix}", f"serial{suffix}"]


def main(argv: Sequence[str] | None = None) -> int:
    parser = train_step.make_parser(__doc__, blocks=30)
    parser.add_argument("--precision", nargs="+", choices=PRECISIONS, default=["fp32"], help="(default fp32)")
    parser.add_argument("--device", default="cpu", help="cpu (default) or cuda")
    parser.add_argument("--recompute", action="store_true", help="activation checkpointing in fp32")
    arguments = parser.parse_args(argv)
    names = [name for precision in arguments.precision for name in names_of(precision)]
    if arguments.recompute:
        names = ["serial", "serial", "colossus", *RECOMPUTING]
    return train_step.run(arguments, names, title="one process: ", device=arguments.device)


if __name__ == "__main__":
    raise SystemExit(main())
