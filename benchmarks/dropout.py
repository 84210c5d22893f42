"""A training step with dropout beside one whose masks are drawn by torch's generator, and one without.

    python -m benchmarks.dropout

One process with one thread, a GPT of hidden size 512, rate 0.1. `keyed` is `layers.Dropout`: masks hashed from seed,
step, sample, module, token and feature. `bernoulli` draws them by ``Tensor.bernoulli_``, and those of attention in
torch's own kernel.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import colossus
from benchmarks import common
from colossus import layers

RATE = 0.1
CASES = ("none", "bernoulli", "keyed")


def by_bernoulli(x: Tensor, placement: Any) -> Tensor:
    mask = torch.empty(x.shape, dtype=torch.bool, device=x.device).bernoulli_(1 - RATE)
    return x * mask * (1 / (1 - RATE))


def in_kernel(dropout: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, inner: Any) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, mask, RATE, is_causal=mask is None)


def step_of(case: str, arguments: Any, attention: bool) -> Callable[[], float]:
    """Return a function that runs some steps and returns the seconds of one."""
    rate = RATE if case != "none" else 0.0
    model = dict(
        type="GPT", num_layers=arguments.layers, hidden_size=arguments.hidden, num_heads=8, vocab_size=256,
        seq_len=arguments.tokens, dropout=rate, attention_dropout=rate if attention else 0.0,
    )  # fmt: skip
    train = dict(global_batch_size=arguments.batch, clip_grad_norm=1.0)
    engine = colossus.initialize(dict(parallel=dict(data=1), model=model, train=train, device="cpu"))
    if case == "bernoulli":
        for module in engine.model.modules():
            if isinstance(module, layers.Dropout):
                vars(module)["drop"] = by_bernoulli
            elif isinstance(module, layers.Attention):
                vars(module)["_attend_dropping"] = in_kernel
    ids = torch.randint(0, 256, (arguments.batch, arguments.tokens + 1), generator=torch.Generator().manual_seed(0))
    batch = {"inputs": ids[:, :-1], "labels": ids[:, 1:]}

    def step() -> float:
        begin = time.perf_counter()
        for _ in range(arguments.steps):
            engine.train_step(batch)
        return (time.perf_counter() - begin) / arguments.steps

    step()
    return step


def main(argv: Sequence[str] | None = None) -> int:
    parser = common.make_parser(__doc__, blocks=15)
    for name, value in dict(hidden=512, layers=2, tokens=128, batch=8, steps=2).items():
        parser.add_argument(f"--{name}", type=int, default=value, help="(default %(default)s)")
    arguments = parser.parse_args(argv)
    if arguments.smoke:
        arguments.hidden, arguments.layers, arguments.tokens, arguments.blocks = 64, 1, 8, 2
    torch.set_num_threads(1)
    results: dict[str, common.Series] = {}
    for what, attention in (("dropout", False), ("dropout, of attention too", True)):
        series = common.alternate(
            {case: step_of(case, arguments, attention) for case in CASES}, arguments.blocks, label=what
        )
        rows = [
            (case, f"{1e3 * common.Spread.of(series[case]).median:.1f}", common.ratio(series, case, "bernoulli"))
            for case in CASES
        ]
        common.print_table(f"{what}: one step", ("masks", "ms", "time / bernoulli"), rows)
        results[what] = series
    common.write_json(arguments.json, {"seconds": results, "sizes": [arguments.hidden, arguments.layers]})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
