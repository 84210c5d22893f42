"""torchtitan's Llama in our names, and the order in which it has the rows of queries and keys.

torchtitan rotates neighbouring rows of a head, as Meta's Llama does, and colossus those of its two halves, as Hugging
Face does. So row i of a head here is row 2 i there, and row i of its second half is row 2 i + 1. (The names and the
order are those of torchtitan's ``models/llama3``, whose own converter to Hugging Face does the same.)
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from colossus.checkpoint.errors import CheckpointError

#: beside the weights, as beside Meta's: ``{"n_heads": 32}``
PARAMS = "params.json"
_NAMES = {
    r"tok_embeddings\.weight": "embedding.weight",
    r"layers\.(\d+)\.attention_norm\.weight": r"blocks.\1.attention_norm.weight",
    r"layers\.(\d+)\.attention\.wq\.weight": r"blocks.\1.attention.qkv.query.weight",
    r"layers\.(\d+)\.attention\.wk\.weight": r"blocks.\1.attention.qkv.key.weight",
    r"layers\.(\d+)\.attention\.wv\.weight": r"blocks.\1.attention.qkv.value.weight",
    r"layers\.(\d+)\.attention\.wo\.weight": r"blocks.\1.attention.out.weight",
    r"layers\.(\d+)\.ffn_norm\.weight": r"blocks.\1.mlp_norm.weight",
    r"layers\.(\d+)\.feed_forward\.w1\.weight": r"blocks.\1.mlp.up.gate.weight",
    r"layers\.(\d+)\.feed_forward\.w3\.weight": r"blocks.\1.mlp.up.value.weight",
    r"layers\.(\d+)\.feed_forward\.w2\.weight": r"blocks.\1.mlp.down.weight",
    r"norm\.weight": "norm.weight",
    r"output\.weight": "head.weight",
}
#: older versions saved the table of rotary positions
_NO_WEIGHT = "freqs_cis"


@dataclass(frozen=True)
class Translation:
    """The names of a folder's weights here, and which of them have rows in the order of rotary pairs.

    Attributes:
        names: names in the folder -> names here; those that are not in it are left out.
        head_rows: names here -> rows of a head, of the weights whose rows are in pairs.
    """

    names: Mapping[str, str]
    head_rows: Mapping[str, int] = field(default_factory=dict)


def translate(folder: Path, shapes: Mapping[str, Collection[int]]) -> Translation:
    """Return the translation of torchtitan's Llama, or the names as they are where a folder has another model.

    Args:
        folder: the folder of weights.
        shapes: shapes of its weights by name.

    Raises:
        CheckpointError: it is torchtitan's Llama with weights that ours has not, or nothing says how many heads it has.
    """
    if "tok_embeddings.weight" not in shapes or "layers.0.attention.wq.weight" not in shapes:
        return Translation({name: name for name in shapes})
    names: dict[str, str] = {}
    for name in shapes:
        match = next(((match, ours) for theirs, ours in _NAMES.items() if (match := re.fullmatch(theirs, name))), None)
        if match is not None:
            names[name] = match[0].expand(match[1])
        elif name != _NO_WEIGHT:
            raise CheckpointError(f"{folder}: has torchtitan's names, and {name}, which its Llama has not")
    heads = _num_heads(folder)
    rows = next(iter(shapes["layers.0.attention.wq.weight"]))
    if heads < 1 or rows % (2 * heads):
        raise CheckpointError(f"{folder / PARAMS}: n_heads = {heads}: the weights have {rows} rows of queries")
    paired = (name for name in names if name.endswith((".wq.weight", ".wk.weight")))
    return Translation(names, {names[name]: rows // heads for name in paired})


def _num_heads(folder: Path) -> int:
    path = folder / PARAMS
    try:
        return int(json.loads(path.read_text())["n_heads"])
    except FileNotFoundError:
        raise CheckpointError(
            f"{folder}: has torchtitan's Llama, whose rows of queries and keys are in another order within a head, and "
            f"nothing says how many heads there are: echo '{{\"n_heads\": 32}}' > {path}"
        ) from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f'{path}: must be {{"n_heads": 32}}, of the model: {error}') from None


def row_there(row: int, head_rows: int) -> int:
    """Return the place in the folder of a row of queries or keys."""
    head, inside = divmod(row, head_rows)
    half, pair = divmod(inside, head_rows // 2)
    return head * head_rows + 2 * pair + half
