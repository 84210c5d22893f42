"""Loading a sharded folder of Hugging Face in one process, and under 1D 2, beside transformers' own from_pretrained.

    python -m benchmarks.hf_loading                      # GPT-2 and Llama of about 400 MB in fp32, Llama in bf16
    python -m benchmarks.hf_loading --hidden 512 --layers 6 --folder /mnt/scratch

The files are in the page cache, and weights are used in fp32. transformers maps files of the same dtype into memory and
reads nothing before a weight is touched, so the clock stops when each weight has been written to once, as a training
step does, for both. Ours loads into a model that is there; from_pretrained makes one on the meta device, which is in
its time. Logits are compared before the clock starts. Memory is the peak of a process that has not loaded before, above
the bytes of the weights that it has then.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks import common
from benchmarks.common import Series
from benchmarks.hf_loading_worker import Worker, make_folder
from benchmarks.ranks import RankGroup

MB = 1e6
#: family, dtype in the files
FOLDERS = (("gpt2", torch.float32), ("llama", torch.float32), ("llama", torch.bfloat16))
#: ranks of each case
CASES = {"colossus": 1, "colossus-tensor-2": 2, "transformers": 1}
_MOST_GAP = 1e-3


def main(argv: Sequence[str] | None = None) -> int:
    parser = common.make_parser(__doc__, blocks=9)
    parser.add_argument("--hidden", type=int, default=768, help="hidden size (default %(default)s)")
    parser.add_argument("--layers", type=int, default=12, help="layers (default %(default)s)")
    parser.add_argument("--vocab", type=int, default=16384, help="vocabulary (default %(default)s)")
    parser.add_argument("--folder", type=Path, help="where to write (default: a temporary folder)")
    arguments = parser.parse_args(argv)
    sizes = (arguments.hidden, arguments.layers, arguments.vocab)
    if arguments.smoke:
        sizes, arguments.blocks = (64, 2, 96), 2
    root = Path(tempfile.mkdtemp(prefix="colossus-benchmark-", dir=arguments.folder))
    try:
        results = [_run(family, dtype, sizes, arguments.blocks, root) for family, dtype in FOLDERS]
    finally:
        shutil.rmtree(root, ignore_errors=True)
    common.write_json(arguments.json, {"sizes": sizes, "results": results})
    return 0


def _run(family: str, dtype: torch.dtype, sizes: tuple[int, int, int], blocks: int, root: Path) -> dict[str, Any]:
    title = f"{family} in {str(dtype).removeprefix('torch.')}"
    folder = root / title.replace(" ", "-")
    common.progress(f"{title}: writing")
    make_folder(folder, family, dtype, sizes)
    num_bytes, num_files = (
        sum(file.stat().st_size for file in folder.iterdir()),
        len(list(folder.glob("*.safetensors"))),
    )
    groups = {name: _group(name, folder) for name in CASES}
    try:
        logits = {name: torch.from_numpy(group.call("logits")[0]) for name, group in groups.items()}
        for name, mine in logits.items():
            gap = (mine - logits["transformers"]).abs().max().item()
            if not gap < _MOST_GAP:
                raise RuntimeError(f"{title}: logits of {name} differ by {gap:.2g} from those of transformers")
        series = common.alternate(
            {name: partial(group.slowest, "time") for name, group in groups.items()}, blocks, label=f"{title}:"
        )
    finally:
        for group in groups.values():
            group.close()
    peaks = {name: _group(name, folder).peak_of("peak") for name in CASES}  # bytes above those of the weights
    _report(f"{title}, {num_bytes / MB:.0f} MB in {num_files} files", series, peaks)
    return {"title": title, "bytes": num_bytes, "files": num_files, "seconds": series, "peak_bytes": peaks}


def _group(name: str, folder: Path) -> RankGroup:
    return RankGroup(name, CASES[name], partial(Worker, name, CASES[name], folder))


def _report(title: str, series: Series, peaks: dict[str, int | None]) -> None:
    rows = []
    for name, seconds in series.items():
        against = "" if name == "transformers" else str(common.ratio(series, name, "transformers"))
        peak = peaks[name]
        above = "N/A" if peak is None else f"{peak / MB:.1f}"
        rows.append([name, f"{common.Spread.of(seconds).median:.3f}", against, above])
    common.print_table(title, ["", "s", "/ transformers", "MB above the weights"], rows)


if __name__ == "__main__":
    sys.exit(main())
