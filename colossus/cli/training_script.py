"""Train what config.py declares, in a loop of your own; `colossus launch config.py` trains the same without one.

python train.py                                             # one process: a config whose plan has one
torchrun --nproc-per-node 4 train.py                        # a plan of four
torchrun --nproc-per-node 2 train.py parallel.tensor=2      # keys of the config can be overridden
"""

import sys
from pathlib import Path

import colossus


def main() -> None:
    engine = colossus.initialize(Path(__file__).with_name("config.py"), overrides=sys.argv[1:])
    steps = engine.config.train.steps
    for batch in engine.loader:  # this rank's share of each global batch, without end
        result = engine.train_step(batch)
        if engine.context.is_logging_rank and (result.step % 10 == 0 or result.step == steps):
            print(f"step {result.step}/{steps}: loss {result.loss:.4f}, grad norm {result.grad_norm:.3f}", flush=True)
        if result.step == steps:
            break
    engine.close()


if __name__ == "__main__":
    main()
