"""torchtitan's Llama in our names, and the order in which it has the rows of queries and keys.

torchtitan rotates neighbouring rows of a head, as Meta's Llama does, and colossus those of its two halves, as Hugging
Face does. So row i of a head here is row 2 i there, and row i of its second half is row 2 i + 1. (The names and the
order are those of torchtitan's ``models/llama3``, whose own converter to Hugging Face does the same.)
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from colossus.checkpoint.errors import CheckpointError
from colossus.checkpoint.stored_place import PARAMS, StoredPlace, ask_for_heads, read_params

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


def torchtitan_places(folder: Path, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, StoredPlace] | None:
    """Return the places of our weights by our names, or None where a folder has another model.

    Args:
        folder: the folder of weights.
        shapes: shapes of its weights by name.

    Raises:
        CheckpointError: it is torchtitan's Llama with weights that ours has not, or nothing says how many heads it has.
    """
    if "tok_embeddings.weight" not in shapes or "layers.0.attention.wq.weight" not in shapes:
        return None
    heads = read_params(folder).get("n_heads")
    if heads is None:
        raise ask_for_heads(folder, "torchtitan's Llama")
    rows = shapes["layers.0.attention.wq.weight"][0]
    if heads < 1 or rows % (2 * heads):
        raise CheckpointError(f"{folder / PARAMS}: n_heads = {heads}: the weights have {rows} rows of queries")
    places: dict[str, StoredPlace] = {}
    for name, shape in shapes.items():
        match = next(((match, ours) for theirs, ours in _NAMES.items() if (match := re.fullmatch(theirs, name))), None)
        if match is not None:
            is_paired = name.endswith((".wq.weight", ".wk.weight"))
            order = partial(row_there, head_rows=rows // heads) if is_paired else None
            places[match[0].expand(match[1])] = StoredPlace(name, shape, row_there=order)
        elif name != _NO_WEIGHT:
            raise CheckpointError(f"{folder}: has torchtitan's names, and {name}, which its Llama has not")
    return places


def row_there(row: int, head_rows: int) -> int:
    """Return the place in the folder of a row of queries or keys."""
    head, inside = divmod(row, head_rows)
    half, pair = divmod(inside, head_rows // 2)
    return head * head_rows + 2 * pair + half
