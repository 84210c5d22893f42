"""The random generators of a rank that keep a state: the global ones, which code of the user's outside of forwards
draws from, and those that were named (`RngStreams.named`). All else is drawn by keys, and needs the step alone.

Under the plan of the checkpoint each rank goes on with its own. Under another plan with as many data ranks, with those
of the first rank of its data rank: all ranks of one model draw the same; named generators that were not the same on
these begin anew. With another number of data ranks the global ones are seeded from (seed, data rank, step), so that no
number comes again, and named ones begin anew.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from colossus.checkpoint.values import decode
from colossus.context.parallel_context import ParallelContext
from colossus.random import GlobalRng
from colossus.state.of_ranks import of_ranks


def rng_state(context: ParallelContext) -> dict[str, Any]:
    """Of this rank: of torch on the host and the rank's device, of Python and of numpy, and what is named."""
    devices = _devices(context)
    of_torch, (version, numbers, gauss), of_numpy = GlobalRng(tuple(devices.values())).get_state()
    position = context.rng.state_dict()
    return {
        "data_index": context.index("data"),
        "step": position["step"],
        "microbatch": position["microbatch"],
        "torch": dict(zip(devices, of_torch, strict=True)),
        "python": [version, torch.tensor(numbers, dtype=torch.int64), gauss],
        "numpy": of_numpy,
        "named": {name: [device.partition(":")[0], state] for name, (device, state) in position["named"].items()},
    }


def restore_rng(
    values: Mapping[str, Any],
    tensor: Callable[[str], Tensor],
    context: ParallelContext,
    *,
    is_same_plan: bool,
    num_steps: int,
) -> None:
    """Take back what the ranks of a checkpoint gave, see above.

    Args:
        values: of the manifest, encoded.
        tensor: reads one by its key.
        num_steps: optimizer steps done.
    """
    saved = of_ranks(values, "rng")
    if not saved:
        return
    if is_same_plan:
        _set(decode(saved[context.rank], tensor), context)
        return
    index = context.index("data")
    if max(value["data_index"] for value in saved.values()) + 1 != context.size("data"):
        key = context.rng.key("torch", index, num_steps)
        GlobalRng(tuple(_devices(context).values())).seed(key)
        return
    of_model = [decode(saved[rank], tensor) for rank in sorted(saved) if _goes_with(saved[rank], index)]
    first = of_model[0]
    first["named"] = {
        name: [kind, state]
        for name, (kind, state) in first["named"].items()
        if all(name in each["named"] and torch.equal(each["named"][name][1], state) for each in of_model)
    }
    _set(first, context)


def _goes_with(encoded: Mapping[str, Any], data_index: int) -> bool:
    return bool(encoded["data_index"] == data_index)


def _devices(context: ParallelContext) -> dict[str, torch.device]:
    return {"cpu": torch.device("cpu"), context.device.type: context.device}


def _set(state: Mapping[str, Any], context: ParallelContext) -> None:
    devices = {kind: device for kind, device in _devices(context).items() if kind in state["torch"]}
    version, numbers, gauss = state["python"]
    python = version, tuple(numbers.tolist()), gauss
    of_torch = [state["torch"][kind] for kind in devices]
    GlobalRng(tuple(devices.values())).set_state((of_torch, python, state["numpy"]))
    rng = context.rng
    named = {
        name: (str(_devices(context)[kind]), value)
        for name, (kind, value) in state["named"].items()
        if kind in _devices(context)
    }
    rng.load_state_dict(
        {"seed": rng.seed, "step": state["step"], "microbatch": state["microbatch"], "calls": {}, "named": named}
    )
