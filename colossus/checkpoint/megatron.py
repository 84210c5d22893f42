"""Megatron-Core's GPT in our names: its distributed checkpoints (``torch_dist``) are folders of DCP.

The layers of a homogeneous model are stacked: a key without the layer's number has them along a new first dim
(``TransformerBlock.sharded_state_dict``, megatron/core/transformer/transformer_block.py); with
``non_homogeneous_layers`` each has keys of its own. ``linear_qkv`` has, for each group, the rows of its heads' queries,
its key and its value (``SelfAttention.get_query_key_value_tensors``, megatron/core/transformer/attention.py). A gated
``linear_fc1`` has the gate's rows before the others (``glu`` and ``apply_swiglu_sharded_factory``,
megatron/core/transformer/mlp.py, which may call them ``weight_w`` and ``weight_v``). The norms before them have the
names that Transformer Engine gives them or those of the local layers (``sharded_state_dict_keys_map``,
megatron/core/models/gpt/gpt_layer_specs.py). Rotary positions turn the halves of a head, as ours do, unless
``rotary_interleaved`` (megatron/core/models/common/embeddings/rope_utils.py). Tables have rows that pad the vocabulary.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from colossus.arithmetic import listed
from colossus.checkpoint.errors import CheckpointError
from colossus.checkpoint.stored_place import PARAMS, StoredPlace, ask_for_heads, read_params

Shape = tuple[int, ...]

#: the state that is no tensor (``COMMON_STATE_FNAME``, megatron/core/dist_checkpointing/strategies/common.py)
COMMON = "common.pt"
_OUTSIDE = {
    "embedding.word_embeddings.weight": "embedding.weight",
    "embedding.position_embeddings.weight": "positions.weight",
    "decoder.final_layernorm.weight": "norm.weight",
    "decoder.final_layernorm.bias": "norm.bias",
    "output_layer.weight": "head.weight",
}
#: modules of a layer -> ours; weight and bias have their own names
_MODULES = {
    "input_layernorm.": "attention_norm.",
    "self_attention.linear_qkv.layer_norm_": "attention_norm.",
    "self_attention.linear_proj.": "attention.out.",
    "self_attention.q_layernorm.": "attention.q_norm.",
    "self_attention.k_layernorm.": "attention.k_norm.",
    "pre_mlp_layernorm.": "mlp_norm.",
    "mlp.linear_fc1.layer_norm_": "mlp_norm.",
    "mlp.linear_fc2.": "mlp.down.",
}
_LAYER = re.compile(r"decoder\.layers\.(?:(\d+)\.)?(.+?)(weight|bias)(_w|_v)?")
_TABLES = ("embedding.weight", "head.weight")
#: arguments of Megatron's (megatron/training/arguments.py) whose other values mean another model under the same names
_REQUIRED: dict[str, tuple[Any, ...]] = {
    "rotary_interleaved": (False,),
    "apply_layernorm_1p": (False,),
    "apply_residual_connection_post_layernorm": (False,),
    "multi_latent_attention": (False,),
    "attention_output_gate": (False,),
    "qk_l2_norm": (False,),
    "squared_relu": (False,),
    "num_experts": (),
    "position_embedding_type": ("learned_absolute", "rope", "yarn"),
}


def megatron_places(folder: Path, shapes: Mapping[str, Shape]) -> dict[str, StoredPlace] | None:
    """Return the places of our weights by our names, or None where a folder has another model.

    Args:
        folder: the folder of weights.
        shapes: shapes of its weights by name.

    Raises:
        CheckpointError: it is Megatron's GPT with weights, options or sizes that ours has not, or nothing says how many
            heads it has.
    """
    section = "module." if "module.embedding.word_embeddings.weight" in shapes else ""  # NeMo's
    plain = {name.removeprefix(section): shape for name, shape in shapes.items()}
    if "embedding.word_embeddings.weight" not in plain or not any(map(_LAYER.fullmatch, plain)):
        return None
    params = _params(folder)
    places: dict[str, StoredPlace] = {}
    unknown: list[str] = []
    for name, stored in plain.items():
        match = _LAYER.fullmatch(name)
        if name in _OUTSIDE:
            ours = _OUTSIDE[name]
            rows = params.get("vocab_size", stored[0]) if ours in _TABLES else stored[0]
            if not 0 < rows <= stored[0]:
                raise CheckpointError(f"{folder / PARAMS}: vocab_size = {rows}: {name} has {stored[0]} rows")
            places[ours] = StoredPlace(section + name, (rows, *stored[1:]))
            continue
        parts = dict(_parts(folder, match, plain, params["n_heads"])) if match is not None else {}
        if match is None or not parts:
            unknown.append(name)
            continue
        is_stacked = match[1] is None
        for layer in range(stored[0]) if is_stacked else (None,):
            for ours, (rows, order) in parts.items():
                shape = (rows, *stored[2 if is_stacked else 1 :])
                places[f"blocks.{match[1] if layer is None else layer}.{ours}"] = StoredPlace(
                    section + name, shape, layer, order
                )
    if unknown:
        raise CheckpointError(f"{folder}: has Megatron's names, and such as its GPT has not: {listed(sorted(unknown))}")
    return places


def _parts(
    folder: Path, match: re.Match[str], shapes: Mapping[str, Shape], heads: int
) -> Iterator[tuple[str, tuple[int, Callable[[int], int] | None]]]:
    """Yield the names in a block of the weights that a tensor of a layer has, with their rows and the rows' order."""
    number, module, kind, half = match.groups()
    rows = shapes[match[0]][1 if number is None else 0]

    def features_into(other: str) -> int:
        name = f"{match[0][: match.start(2)]}{other}.weight"
        if name not in shapes:
            raise CheckpointError(f"{folder}: has {match[0]}, and no {name}")
        return shapes[name][-1]

    if module == "self_attention.linear_qkv." and half is None:
        queries = features_into("self_attention.linear_proj")
        size, keys = queries // max(heads, 1), (rows - queries) // 2
        groups = keys // max(size, 1)
        if heads < 1 or groups < 1 or heads % groups or (heads * size, 2 * groups * size) != (queries, rows - queries):
            raise CheckpointError(
                f"{folder}: n_heads = {heads}: {match[0]} has {rows} rows, {queries} of them queries, which are no "
                f"whole heads in equal groups"
            )
        of_group = heads // groups * size
        for name, first, length in (("query", 0, of_group), ("key", of_group, size), ("value", of_group + size, size)):
            yield f"attention.qkv.{name}.{kind}", (groups * length, _in_groups(length, first, of_group + 2 * size))
    elif module == "mlp.linear_fc1.":
        wide = features_into("mlp.linear_fc2")
        if half is not None:
            yield f"mlp.up.{'gate' if half == '_w' else 'value'}.{kind}", (rows, None)
        elif rows == 2 * wide:
            yield f"mlp.up.gate.{kind}", (wide, None)
            yield f"mlp.up.value.{kind}", (wide, _in_groups(wide, wide, rows))
        else:
            yield f"mlp.up.{kind}", (rows, None)
    elif module in _MODULES and half is None:
        yield f"{_MODULES[module]}{kind}", (rows, None)


def _in_groups(length: int, first: int, group_rows: int) -> Callable[[int], int]:
    """Return the order of rows of which each group of ``group_rows`` rows has ``length``, from ``first`` on."""
    return lambda row: row // length * group_rows + first + row % length


class _Opaque:
    """An object of a class that is not known here: its attributes, without code."""

    def __init__(self, *_: object) -> None:
        """Take the arguments of any class."""


def _params(folder: Path) -> dict[str, Any]:
    """Return the number of heads and, where a user says it, of the vocabulary.

    They are in a file of the user's or among the arguments that Megatron saves.

    Raises:
        CheckpointError: no file says how many heads there are, or the arguments are those of another model.
    """
    params = read_params(folder)
    arguments: Mapping[str, Any] = {}
    try:
        arguments = _arguments(folder)
    except Exception as error:  # torch raises many types for a file that it does not read
        if "n_heads" not in params:
            raise CheckpointError(
                f"{folder / COMMON}: cannot be read without running its code ({type(error).__name__}): say what is "
                f"needed of it: echo '{{\"n_heads\": 32}}' > {folder / PARAMS}"
            ) from None
    wrong = [
        f"{name} = {arguments[name]!r}" + f" (not {' or '.join(map(repr, values))})" * bool(values)
        for name, values in _REQUIRED.items()
        if arguments.get(name) not in (None, *values)
    ]
    if wrong:
        raise CheckpointError(f"{folder}: is a GPT of Megatron's that colossus has no model for: {', '.join(wrong)}")
    heads = params.get("n_heads", arguments.get("num_attention_heads"))
    if type(heads) is not int:
        raise ask_for_heads(folder, "Megatron's GPT")
    return {**params, "n_heads": heads}


def _arguments(folder: Path) -> Mapping[str, Any]:
    """Return the arguments with which Megatron ran; {} where they are not there, as in NeMo's folders."""
    path = folder / COMMON
    if not path.is_file():
        return {}
    serialization = importlib.import_module("torch").serialization
    names = serialization.get_unsafe_globals_in_checkpoint(path)
    with serialization.safe_globals([(_Opaque, name) for name in names]):
        state = serialization.load(path, map_location="cpu", weights_only=True, mmap=True)
    return vars(state["args"]) if isinstance(state, dict) and isinstance(state.get("args"), _Opaque) else {}
