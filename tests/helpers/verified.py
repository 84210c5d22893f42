"""Config files for ``colossus verify``, and what it prints."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable
from pathlib import Path

from helpers.ranks import run_ranks

from colossus.config import load_config
from colossus.config.plans import world_size
from colossus.engine.fit import fit
from colossus.engine.initialize import initialize

DATA = """
import os
import torch
import torch.nn.functional as F
from torch import nn
from colossus import layers

class _Tokens(torch.utils.data.Dataset):
    def __len__(self):
        return 40
    def __getitem__(self, index):
        row = torch.randint(0, 13, (7,), generator=torch.Generator().manual_seed(index))
        return {"inputs": row[:-1], "labels": row[1:]}

class _Points(torch.utils.data.Dataset):
    def __len__(self):
        return 40
    def __getitem__(self, index):
        return torch.randn(6, generator=torch.Generator().manual_seed(index)), torch.tensor(index % 4)

def _loss(outputs, batch):
    return F.cross_entropy(outputs, batch[1], reduction="sum"), batch[1].numel()
"""

#: a config text, words of the command line, and `middle` -> (exit code, standard output, standard error)
Verify = Callable[..., tuple[int, str, str]]


def config_file(folder: Path, text: str, middle: str = "nn.Identity()") -> Path:
    path = folder / "user.py"
    path.write_text(DATA + textwrap.dedent(text).replace("BODY", middle))
    return path


def launch_forked(config: object, file: Path, is_reference: bool) -> int:
    """In the place of the launch of one of the two runs: forked ranks."""
    world = 1 if is_reference else world_size(load_config(file).parallel)
    file.with_suffix("").mkdir()
    run_ranks(world, run_forked, str(file), world, with_context=False)
    return 0


def run_forked(rank: int, path: str, world: int) -> None:
    """What the launcher's worker does, in a forked process."""
    config = load_config(path, (), world)
    engine = initialize(config)
    fit(engine, [hook.type(**hook.options) for hook in config.hooks])
    engine.close()


def counts(out: str) -> dict[str, int]:
    """Kind of thing -> how many were compared."""
    rows = [re.match(r"(\D+?)  +(\d+) ", line) for line in out.partition("\nagree ")[2].splitlines()]
    return {row[1]: int(row[2]) for row in rows if row}


def leftovers(tmp_path: Path) -> list[str]:
    return [path.name for path in tmp_path.glob("colossus-verify-*/**/*") if path.is_file()]
