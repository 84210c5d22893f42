"""What modules keep beyond tensors: torch's ``get_extra_state`` and ``set_extra_state``.

As buffers, it may differ between ranks (of counts of a rank's own samples, say): under the plan of the checkpoint each
rank takes its own back, under another plan that of the first rank that had the module.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from colossus.checkpoint.values import decode
from colossus.state.of_ranks import of_ranks


def module_states(model: nn.Module) -> dict[str, Any]:
    """Of this rank's modules that keep some, by full name."""
    return {name: module.get_extra_state() for name, module in _keepers(model).items()}


def restore_module_states(
    model: nn.Module, values: Mapping[str, Any], tensor: Callable[[str], Tensor], rank: int | None
) -> None:
    """Take back what the ranks of a checkpoint gave.

    Args:
        values: of the manifest, encoded.
        tensor: reads one by its key.
        rank: this one under the plan of the checkpoint, else None.
    """
    saved = of_ranks(values, "modules")
    order = sorted(saved, key=lambda each: (each != rank, each))
    for name, module in _keepers(model).items():
        source = next((each for each in order if name in saved[each]), None)
        if source is not None:
            module.set_extra_state(decode(saved[source][name], tensor))


def _keepers(model: nn.Module) -> dict[str, nn.Module]:
    own = nn.Module.get_extra_state
    return {name: module for name, module in model.named_modules() if type(module).get_extra_state is not own}
