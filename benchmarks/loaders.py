"""Batches of the data room beside torch's own DataLoader on the same dataset.

    python -m benchmarks.loaders
    python -m benchmarks.loaders --only "tuples, stream" --batch 64
    python -m benchmarks.loaders --device cuda      # steps that read their batches beside steps that have one there

One process with one thread, as a rank is. Each block reads the same number of batches from both, one after the other;
the first batch, which starts workers, is not timed. Rows of a file have 1024 tokens, and their batches a sixteenth of
the samples; torch's are read by a dataset as one writes it by hand. The last column is ours over torch's. All kinds but
the "drawing" one say `deterministic = True`; that one augments each sample with random numbers: ours are seeded for
each sample, so that they are the same under every plan and after every resume.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

import colossus
from benchmarks import common
from benchmarks.common import Series
from benchmarks.timing import seconds_per_call, take_turns
from benchmarks.undrawn import fill, undrawn
from colossus.data import Packed, TokenFile, TokenFileDocuments, build_loaders
from colossus.data.documents.packed import NO_LABEL

SEQ_LEN, SAMPLES = 64, 1 << 14
#: tokens of rows of a file
FILE_SEQ_LEN = 1024
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


class FileWindows(Dataset[Any]):
    """Windows of a memory map, as a loop of one's own has them."""

    def __init__(self, tokens: np.ndarray) -> None:
        self.tokens = tokens

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // FILE_SEQ_LEN

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        start = index * FILE_SEQ_LEN
        row = torch.from_numpy(self.tokens[start : start + FILE_SEQ_LEN + 1].astype(np.int64))
        return {"inputs": row[:-1], "labels": row[1:]}


class FileRows(Dataset[Any]):
    """The rows of a `Packed`, put together sample by sample."""

    def __init__(self, packed: Packed) -> None:
        self.packed, self.spans = packed, packed._spans

    def __len__(self) -> int:
        return len(self.packed)

    def __getitem__(self, index: int) -> dict[str, Any]:
        tokens, place = self.packed.documents.tokens, 0
        ids, labels, positions = (torch.zeros(FILE_SEQ_LEN, dtype=torch.int64) for _ in range(3))
        labels.fill_(NO_LABEL)
        documents = torch.full((FILE_SEQ_LEN,), int(self.spans.rows[index + 1] - self.spans.rows[index]))
        for number, span in enumerate(range(self.spans.rows[index], self.spans.rows[index + 1])):
            start, length = self.spans.starts[span], self.spans.lengths[span]
            own = torch.from_numpy(tokens[start : start + length + 1].astype(np.int64))
            stop = place + int(length)
            ids[place:stop], documents[place:stop] = own[:length], number
            positions[place:stop] = torch.arange(int(length))
            num_labels = int(length) - int(self.spans.closed[span])
            labels[place : place + num_labels] = own[1 : num_labels + 1]
            place = stop
        return {"inputs": {"ids": ids, "documents": documents, "positions": positions}, "labels": labels}


def file_cases(folder: Path) -> dict[str, tuple[Any, Any]]:
    """Return the dataset for torch's DataLoader and ours over one file of token ids, by the name of the case."""
    generator = np.random.default_rng(0)
    lengths = generator.lognormal(5.5, 1.0, 20_000).astype(np.int64) + 1
    tokens = generator.integers(1, 50_257, int(lengths.sum()), np.uint16)
    tokens[np.cumsum(lengths) - 1] = 0
    tokens.tofile(file := folder / "tokens.bin")
    ours = TokenFile(file, FILE_SEQ_LEN, validation_fraction=0)
    packed = Packed(TokenFileDocuments(file, end=0), FILE_SEQ_LEN, validation_fraction=0)
    return {"windows of a file": (FileWindows(ours.tokens), ours), "packed rows": (FileRows(packed), packed)}


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


# -- steps that read their batches ------------------------------------------------------------------------------

#: batches that each worker of torch's DataLoader reads ahead
READ_AHEAD = 2


def fed_config(kind: str, on_gpu: bool) -> dict[str, Any]:
    """Return the config of a GPT on windows of tokens, or of a ViT whose batch is 77 MB on a GPU."""
    hidden, layers, batch, side = (1024, 8, 256, 224) if on_gpu else (32, 1, 4, 32)
    model: dict[str, Any] = dict(num_layers=layers, hidden_size=hidden, num_heads=max(2, hidden // 64))
    if kind == "token windows":
        model |= dict(type="GPT", vocab_size=50_257, seq_len=SEQ_LEN)
        return dict(model=model, data=dict(type=partial(Samples, window)), train=dict(global_batch_size=batch))
    model |= dict(type="ViT", image_size=side, patch_size=16, num_classes=10)
    pixels = torch.randn(16, 3, side, side)
    make = lambda index: {"inputs": pixels[index % 16], "labels": torch.tensor(index % 10)}  # noqa: E731
    return dict(model=model, data=dict(type=partial(Samples, make)), train=dict(global_batch_size=batch // 2))


def time_fed_steps(kind: str, device: torch.device, workers: int, seconds: float) -> Series:
    """Return seconds of steps whose batch comes from the engine's loader, and of steps whose batch is on the device."""
    config = fed_config(kind, device.type == "cuda")
    config["data"]["num_workers"] = workers
    config["train"] |= dict(precision="bf16" if device.type == "cuda" else "fp32", steps=100_000)
    with undrawn():
        engine = colossus.initialize({**config, "optimizer": {"type": "AdamW", "lr": 1e-4}, "device": device.type})
    fill(engine.model)
    batch = next(engine.loader)

    def fed(calls: int) -> float:
        for _ in range(READ_AHEAD * workers):  # batches that were read while the other case had its turn
            engine.train_step(next(engine.loader))
        return seconds_per_call(lambda: engine.train_step(next(engine.loader)), device, calls)

    resident = partial(seconds_per_call, lambda: engine.train_step(batch), device)
    series = take_turns({"loader": fed, "resident": resident}, seconds)
    engine.close()
    return series


def main_fed(arguments: Any) -> None:
    rows, results = [], {}
    for kind in ("token windows", "images"):
        for workers in (0, 2):
            case = f"{kind}, {workers} workers"
            common.progress(case)
            series = results[case] = time_fed_steps(kind, torch.device(arguments.device), workers, arguments.blocks)
            milliseconds = (f"{1e3 * common.Spread.of(taken).median:.2f}" for taken in series.values())
            rows.append((case, *milliseconds, common.ratio(series, "loader", "resident")))
    common.progress("")
    common.print_table("steps: ms", ("case", "with a loader", "without", "with / without"), rows)
    common.write_json(arguments.json, {"cases": results})


def cases_of(batch: int) -> dict[str, tuple[Any, Any, int, int]]:
    """Return, by the name of a case, the data of torch's loader and of ours, the samples of a batch and the workers."""
    cases: dict[str, tuple[Any, Any, int, int]] = {}
    for name, make in KINDS.items():
        for kind, data, numbers in (("map", Samples(make), (0, 2)), ("stream", Stream(make), (0,))):
            for workers in numbers:
                case = f"{name}, {kind}" + (f", {workers} worker{'s' * (workers > 1)}" if workers else "")
                cases[case] = data, data, batch, workers
    with tempfile.TemporaryDirectory() as folder:  # the maps stay when the file is gone
        for name, (of_torch, of_ours) in file_cases(Path(folder)).items():
            cases[name] = of_torch, of_ours, max(1, batch // 16), 0
    return cases


def main() -> None:
    parser = common.make_parser(__doc__, blocks=7)
    parser.add_argument("--batch", type=int, default=1024, help="samples of a batch (default %(default)s)")
    parser.add_argument("--steps", type=int, default=5, help="batches of a block (default %(default)s)")
    parser.add_argument("--only", metavar="TEXT", default="", help="cases whose name has this in it")
    parser.add_argument("--device", metavar="DEVICE", help="cuda or cpu: steps of a model that read their batches")
    arguments = parser.parse_args()
    if arguments.smoke:
        arguments.blocks, arguments.batch, arguments.steps = 2, 32, 1
    torch.set_num_threads(1)
    if arguments.device:
        return main_fed(arguments)
    rows, results = [], {}
    for case, (of_torch, of_ours, batch, workers) in cases_of(arguments.batch).items():
        if arguments.only not in case:
            continue
        readers = {
            TORCH: Reader(partial(plain, of_torch, batch, workers), arguments.steps),
            OURS: Reader(partial(ours, of_ours, batch, workers), arguments.steps),
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
