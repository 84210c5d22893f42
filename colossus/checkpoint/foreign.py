"""What a path holds that is no checkpoint of ours, told by names and first bytes: nothing is loaded. No torch."""

from __future__ import annotations

import os
import re
from pathlib import Path

_WITHOUT_PICKLE = (
    "read its tensors yourself and give them to colossus.checkpoint.load_full_state_dict(model, state_dict, context)"
)


def what_else(path: Path) -> str:
    """What it is, as far as one can see, and what to do with it."""
    if path.is_file():
        return _of_file(path)
    inside = sorted(os.listdir(path))
    if ".metadata" in inside or any(name.endswith(".distcp") for name in inside):
        return (
            "it is one of torch.distributed.checkpoint, whose .metadata is a pickle, which colossus does not open: "
            "load it with torch in a script of your own if you trust it, then colossus.checkpoint.load_full_state_dict"
        )
    ours = [name for name in inside if re.fullmatch(r"rank-\d+\.safetensors", name)]
    if ours:
        return (
            f"beside {ours[0]} there is no manifest.json: it was not finished, or is damaged; take another checkpoint"
        )
    if any(name.endswith(".safetensors") or name == "model.safetensors.index.json" for name in inside):
        return (
            f"it holds safetensors files: of a model folder of Hugging Face checkpoint.weights takes the weights, and "
            f"nothing goes on from one; of others {_WITHOUT_PICKLE}"
        )
    pickles = [name for name in inside if name.endswith((".pt", ".pth", ".bin", ".ckpt", ".pkl"))]
    if pickles:
        return f"it holds {pickles[0]}: {_of_pickle()}"
    return f"it holds {', '.join(inside[:5]) or 'nothing'}{', ..' if len(inside) > 5 else ''}"


def _of_file(path: Path) -> str:
    with path.open("rb") as file:
        first = file.read(16)
    if first.startswith((b"PK\x03\x04", b"\x80")):
        return f"it is {_of_pickle()}"
    if first[8:9] == b"{" and int.from_bytes(first[:8], "little") < path.stat().st_size:
        return (
            f"it is a safetensors file: of a model folder of Hugging Face name the folder; of others {_WITHOUT_PICKLE}"
        )
    return "it is a file: name the folder"


def _of_pickle() -> str:
    return (
        "a file of torch.save, which is a pickle and can run code, so that colossus does not open it: load it with "
        "torch.load(..., weights_only=True) in a script of your own, then colossus.checkpoint.load_full_state_dict"
    )
