"""DeepSpeed's universal checkpoints as weights: ``zero/<parameter>/fp32.pt``, a file of torch for each parameter.

``ds_to_universal.py`` (deepspeed/checkpoint) writes them: whole parameters as ``{"param": tensor, "cat_dim": ..}``
(``merge_tp_slices``), tables without the rows that pad the vocabulary, and, for ZeRO 3 without tensor parallelism, the
flat tensor alone (``merge_zero3_slices``). The names are those of the model that was trained. Here they are the names
of Hugging Face's families, and the model's ``config.json`` lies beside ``zero``. Moments (``exp_avg.pt``) are left.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from colossus.checkpoint.errors import CheckpointError, DamagedCheckpoint
from colossus.hf.hf_folder import CONFIG, HFFolder, StoredTensor, read_folder

PARAMETERS, WEIGHT = "zero", "fp32.pt"


def is_universal(path: Path) -> bool:
    """Return whether a folder has parameters as universal checkpoints do."""
    return next((path / PARAMETERS).glob(f"*/{WEIGHT}"), None) is not None


def read_universal(path: Path) -> HFFolder:
    """Return the parameters of a universal checkpoint by the table of the family that its config names.

    Raises:
        DamagedCheckpoint: a file has no parameter.
        CheckpointError: there is no config, or other parameters than it says, or a file has code.
    """
    if not (path / CONFIG).is_file():
        raise CheckpointError(
            f"{path}: has no {CONFIG}, which says what model this is: copy that of the model of Hugging Face there"
        )
    stored: dict[str, StoredTensor] = {}
    for file in sorted((path / PARAMETERS).glob(f"*/{WEIGHT}")):
        value, is_flat = read_parameter(file)
        dtype = str(value.dtype).removeprefix("torch.")
        stored[file.parent.name] = StoredTensor(str(file.relative_to(path)), dtype, tuple(value.shape), 0, is_flat)
    return read_folder(path, stored)


def read_parameter(path: Path) -> tuple[Any, bool]:
    """Return a mapped tensor, and whether it is without its shape.

    Raises:
        DamagedCheckpoint: the file has no parameter.
        CheckpointError: the file is damaged, or has more than tensors and numbers.
    """
    torch: Any = importlib.import_module("torch")
    try:
        stored = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # torch raises many types for a file that it does not read
        why = "cannot be read: it is damaged, or would run code of its own"
        raise CheckpointError(f"{path}: {why} ({type(error).__name__})") from None
    value = stored.get("param") if isinstance(stored, dict) else stored
    if not isinstance(value, torch.Tensor):
        raise DamagedCheckpoint(f"{path}: has no parameter, but a {type(value).__name__}")
    return value, value is stored
