"""What is said of a function that would be wrong on a part of a tensor."""

from __future__ import annotations

from colossus.sharded_tensor.placement import MixesPartsError, Placement


def refusal(name: str, error: MixesPartsError, x: object, placement: Placement) -> str:
    spoken = _SPOKEN.get(name, name)
    given = f"{spoken} {error}. Its input is a rank's part of a tensor ({x!r}), so it would be wrong in silence."
    if not placement.is_whole:
        return f"{given} Call colossus.layers.to_whole(x) before it.{_hint(name)}"
    return (
        f"{given} parallel.sequence splits dim 1 of a batch, its tokens, which meet in colossus.layers.Attention and "
        f"TransformerBlock; positions are those of colossus.layers.PositionEmbedding and rotary=True; "
        f"colossus.layers.local(x) gives the rank's part as a plain tensor, for code that takes care of it itself"
    )


def _hint(name: str) -> str:
    if "dropout" in name:
        return " For dropout use colossus.layers.Dropout, whose masks differ between shards."
    if name in ("view", "reshape", "unflatten"):
        return (
            " For the heads of an attention leave their number open, view(.., -1, head_dim), or use "
            "colossus.layers.split_heads(x, heads) and merge_heads."
        )
    if name in ("chunk", "split", "tensor_split", "glu"):
        return (
            " For a gate let one linear give both: colossus.layers.Linear(inputs, dict(gate=n, value=n), "
            "split='column') returns two tensors."
        )
    if name in ("layer_norm", "rms_norm"):
        return " colossus.layers.LayerNorm and RMSNorm are right on split features."
    return ""


_SPOKEN = {"__getitem__": "indexing", "__setitem__": "assigning by index", "__matmul__": "@", "__rmatmul__": "@"}
