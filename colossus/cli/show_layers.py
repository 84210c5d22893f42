"""``colossus show --layers``: the modules that became layers of colossus, the split of their weights, their traffic."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable

from torch import nn

from colossus.arithmetic import aligned, byte_count
from colossus.config import Config, ConfigError
from colossus.config.errors import as_config_errors
from colossus.config.plan_head import as_lines, plan_head
from colossus.construct.build_model import build
from colossus.context.parallel_context import ParallelContext
from colossus.convert.parallelize import Conversion, conversion_of
from colossus.convert.swap import Swap
from colossus.layers.latent_attention import Down
from colossus.layers.layer import Layer
from colossus.layers.linear import Linear
from colossus.layout.parameter import spec_of
from colossus.layout.split_parameter import local_shape
from colossus.registry import MODELS
from colossus.tensor_parallel.traffic import matmul_traffic

_HEADER = ("module", "was", "is", "weight on this rank", "sends", "alone")
_WHOLE_HEADER = ("whole on each rank", "class", "bytes", "why")
_NOTE = """\
sends: bytes of activations that a rank sends for a token, forward and backward; alone: the same outside of a pair.
Between the two linears of a pair (column, row) features stay split."""


def render_layers(config: Config) -> str:
    """Return a table of the layers of a config's model on rank 0; layers whose names differ in numbers share a line.

    Raises:
        ConfigError: the config has no model, or the model cannot be built.
    """
    if config.model is None:
        raise ConfigError("model: the config has none, so there are no layers to show", config.source)
    spec = config.model.spec()
    with as_config_errors(source=config.source):
        context = ParallelContext.from_config(config, connect=False)
        model = build(lambda: MODELS.build(spec), context, materialize=False)
    conversion = conversion_of(model) or Conversion({})
    rows, reasons, saved = [], [], 0.0
    for name, module in model.named_modules():
        swap = conversion.swaps.get(name)
        if swap is not None and not swap.became and not module._parameters:
            reasons.append((name, f"{swap.was} stays: {swap.why}"))
        if not isinstance(module, Layer) or (swap is None and not [*module.parameters(recurse=False)]):
            continue
        sends, alone = _bytes_per_token(module)
        saved += alone - sends
        split = f"({module.split})" if isinstance(module, Linear) and module.split else ""
        kind = swap.became if swap is not None else f"{type(module).__name__}{split}"
        weight = getattr(module, "weight", None)
        shape = " x ".join(map(str, local_shape(weight))) if weight is not None else "-"
        rows.append((name, swap.was if swap is not None else "-", kind, shape, _size(sends), _size(alone)))
        if swap is not None and swap.why:
            reasons.append((name, f"is alone: {swap.why}"))
    saving = f"{byte_count(max(saved, 0.0))} a token by pairs"
    head = as_lines({"plan": plan_head(config)["plan"], "saved": saving})
    whole = _whole_weights(model, conversion) if context.size("tensor") > 1 else []
    if context.size("tensor") > 1:
        nbytes, total = sum(size for *_, size in whole), sum(map(_full_bytes, model.parameters()))
        share = f"{nbytes / max(total, 1):.0%}, on each rank"
        head += f"\nwhole       {byte_count(nbytes)} of {byte_count(total)} of weights, {share}"
    if conversion.note:
        head += f"\nnote        {conversion.note}"
    parts = [head, aligned([_HEADER, *_folded(rows)], left_columns=(0, 1, 2, 3)), _NOTE]
    if conversion.shared:
        shared = _folded([(", ".join(names),) for names in conversion.shared])
        parts.append("one input   " + "\n            ".join(names for (names,) in shared))
    if reasons:
        parts.append(aligned(_folded(reasons), left_columns=(0, 1)))
    if whole:
        parts.append(aligned([_WHOLE_HEADER, *_largest(whole)], left_columns=(0, 1, 3)))
    return "\n\n".join(parts)


def _whole_weights(model: nn.Module, conversion: Conversion) -> list[tuple[str, str, str, int]]:
    """Return name, class, reason and bytes of each module whose own parameters are whole on every tensor rank."""
    seen: set[int] = set()
    rows = []
    for name, module in model.named_modules():
        own = [param for param in module._parameters.values() if param is not None and id(param) not in seen]
        seen |= {*map(id, own)}
        nbytes = sum(_full_bytes(param) for param in own if not spec_of(param).layout.shard_axes)
        if nbytes:
            swap = conversion.swaps.get(name)
            kind = type(module).__name__ if swap is None else swap.was
            rows.append((name or "the model", kind, _why_whole(module, swap), nbytes))
    return rows


def _why_whole(module: nn.Module, swap: Swap | None) -> str:
    if swap is not None and not swap.became:
        return swap.why
    if any(param is not None and spec_of(param).layout.shard_axes for param in module._parameters.values()):
        return "its bias alone"
    if isinstance(module, Down):
        return "it is small, and ranks exchange its outputs alone"
    if isinstance(module, Layer):
        return "its sizes do not divide" if isinstance(module, Linear) else "a parameter for each feature or position"
    if isinstance(module, nn.MultiheadAttention):
        return "it computes with its weights itself"
    if "gate_up_proj" in module._parameters:
        return "parallel.expert only spreads gated experts of [out, in] weights without biases"
    if isinstance(module, nn.LayerNorm | nn.RMSNorm | nn.GroupNorm):
        return "norms are whole"
    is_torchs = type(module).__module__.startswith("torch.nn.")
    return "no layer of colossus computes it" if is_torchs else "parameters of its own"


def _full_bytes(parameter: nn.Parameter) -> int:
    return spec_of(parameter).num_elements * parameter.element_size()


def _largest(whole: Iterable[tuple[str, str, str, int]]) -> list[tuple[str, ...]]:
    """Return rows of modules, the largest first.

    Modules whose names differ in numbers share a row, and all modules below one percent share the last.
    """
    sizes: dict[tuple[str, str, str], list[tuple[str, int]]] = {}
    for name, kind, why, size in whole:
        sizes.setdefault((re.sub(r"\b\d+\b", "*", name), kind, why), []).append((name, size))
    rows = [
        (pattern if len(members) > 1 else members[0][0], kind, sum(size for _, size in members), why)
        for (pattern, kind, why), members in sizes.items()
    ]
    limit = sum(size for _, _, size, _ in rows) / 100
    small = [size for _, _, size, _ in rows if size < limit]
    rows = sorted((row for row in rows if row[2] >= limit), key=lambda row: -row[2])
    if small:
        rows.append((f"{len(small)} more", "-", sum(small), "-"))
    return [(name, kind, byte_count(size), why) for name, kind, size, why in rows]


def _bytes_per_token(module: nn.Module) -> tuple[float, float]:
    """Return the bytes of activations that a linear sends for a token, and those that it would send outside of a pair.

    Other modules send 0 bytes.
    """
    if not isinstance(module, Linear) or module.sharding is None:
        return 0.0, 0.0
    shardings, sizes = module.parallel.shardings, module.parallel.sizes
    assert shardings is not None
    regions = shardings.regions
    alone = shardings.choose(None, module.in_features, module.outputs)
    source = regions.inner if module.split == "row" else regions.whole
    target = regions.inner if module.split == "column" else regions.whole
    rows, sent = math.prod(sizes.values()), []
    for sharding, x, y in ((module.sharding, source, target), (alone, regions.whole, regions.whole)):
        if isinstance(sharding, list):  # outside of a pair its sizes do not divide
            sent.append(0.0)
            continue
        moved = matmul_traffic(sharding, x, y, (rows, 1, module.in_features), module.out_features, sizes)
        elements = sum((side.forward + side.backward).elements for side in (moved.x, moved.y))
        sent.append(elements / rows * module.context.precision.compute.itemsize)
    return sent[0], sent[1]


def _size(num_bytes: float) -> str:
    return byte_count(num_bytes) if num_bytes else "-"


def _folded(rows: Iterable[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Join the rows whose first column differs only in numbers into one, with ``*`` for the numbers."""
    names_by_row: dict[tuple[str, ...], list[str]] = {}
    for name, *rest in rows:
        names_by_row.setdefault((re.sub(r"\b\d+\b", "*", name), *rest), []).append(name)
    return [(key[0] if len(names) > 1 else names[0], *key[1:]) for key, names in names_by_row.items()]
