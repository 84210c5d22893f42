"""Batches of the data room beside torch's own DataLoader on the same dataset.

    python -m benchmarks.loaders
    python -m benchmarks.loaders --only "tuples, stream" --batch 64

One process with one thread, as a rank is. Each block reads the same number of batches from both, one after the other;
the first batch, which starts workers, is not timed. The last column is ours over torch's. All kinds but the "drawing"
one say `deterministic = True`; that one augments each sample with random numbers: ours are seeded for each sample, so
that they are the same under every plan and after every resume.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from benchmarks import common
from colossus.data import build_loaders

SEQ_LEN, SAMPLES = 64, 1 << 14
TOKENS = torch.arange(SEQ_LEN * SAMPLES + 1) % 50_257
PIXELS = np.random.default_rng(0).integers(0, 255, (512, 3, 32, 32), dtype=np.uint8)
TORCH, OURS = "torch", "colossus"


def window(index: int) -> dict[str, torch.Tensor]:
    tokens = TOKENS[index * SEQ_LEN : (index + 1) * SEQ_LEN + 1]
    return {"inputs": tokens[:-1], "labels": tokens[1:]}


def image(index: int) -> tuple[torch.Tensor, int]:
    return torch.from_numpy(PIXELS[index % len(PIXELS)]).float().div_(255), index % 10


def drawing_image(index: int) -> tuple[torch.Tensor, int]:
    pixels, label = image(index)
    shift = int(torch.randint(0, 4, ()))
    return pixels.roll(shift, -1).flip(-1) if torch.rand(()) < 0.5 else pixels.roll(shift, -1), label


def pair(index: int) -> tuple[torch.Tensor, torch.Tensor]:
    return TOKENS[index : index + 8], TOKENS[index]


def record(index: int) -> dict[str, Any]:
    return {"x": TOKENS[index : index + 16], "number": index, "weight": 0.5, "name": "sample"}


KINDS: dict[str, Callable[[int], Any]] = {
    "token windows": window,
    "images": image,
    "drawing images": drawing_image,
    "tuples": pair,
    "dicts": record,
}


class Samples(Dataset[Any]):
    def __init__(self, make: Callable[[int], Any]) -> None:
        self.make, self.deterministic = make, make is not drawing_image

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        return self.make(index)


class Stream(IterableDataset[Any]):
    def __init__(self, make: Callable[[int], Any]) -> None:
        self.make, self.deterministic = make, make is not drawing_image

    def __iter__(self) -> Iterator[Any]:
        make = self.make
        for index in range(SAMPLES):
            yield make(index)


class Reader:
    """Seconds of some batches; each time the next ones."""

    def __init__(self, make: Callable[[], Iterator[Any]], steps: int) -> None:
        self._make, self._steps = make, steps
        self._batches = make()
        next(self._batches)

    def __call__(self) -> float:
        began = time.perf_counter()
        for _ in range(self._steps):
            if next(self._batches, None) is None:
                self._batches = self._make()
        return time.perf_counter() - began


def plain(data: Any, batch: int, workers: int) -> Iterator[Any]:
    shuffle = None if isinstance(data, IterableDataset) else True
    return iter(DataLoader(data, batch, shuffle=shuffle, num_workers=workers))


def ours(data: Any, batch: int, workers: int) -> Iterator[Any]:
    config = {"type": lambda: data, "num_workers": workers}
    return iter(build_loaders(config, seed=0, global_batch_size=batch, data_rank=0, data_size=1).train)


def main() -> None:
    parser = common.make_parser(__doc__, blocks=7)
    parser.add_argument("--batch", type=int, default=1024, help="samples of a batch (default %(default)s)")
    parser.add_argument("--steps", type=int, default=5, help="batches of a block (default %(default)s)")
    parser.add_argument("--only", metavar="TEXT", default="", help="cases whose name has this in it")
    arguments = parser.parse_args()
    if arguments.smoke:
        arguments.blocks, arguments.batch, arguments.steps = 2, 32, 1
    torch.set_num_threads(1)
    rows, results = [], {}
    for name, make in KINDS.items():
        for kind, data, numbers in (("map", Samples(make), (0, 2)), ("stream", Stream(make), (0,))):
            for workers in numbers:
                case = f"{name}, {kind}" + (f", {workers} worker{'s' * (workers > 1)}" if workers else "")
                if arguments.only not in case:
                    continue
                readers = {
                    side: Reader(partial(read, data, arguments.batch, workers), arguments.steps)
                    for side, read in ((TORCH, plain), (OURS, ours))
                }
                series = common.alternate(readers, arguments.blocks, label=case)
                milliseconds = [1e3 * min(series[side]) / arguments.steps for side in (TORCH, OURS)]
                rows.append([case, *(f"{value:.2f}" for value in milliseconds), common.ratio(series, OURS, TORCH)])
                results[case] = series
    common.print_table(
        f"Batches of {arguments.batch} samples, {arguments.blocks} blocks of {arguments.steps}: ms per batch",
        ["case", TORCH, OURS, "ours / torch (median [quartiles])"],
        rows,
    )
    common.write_json(arguments.json, {"batch": arguments.batch, "cases": results})


if __name__ == "__main__":
    main()
