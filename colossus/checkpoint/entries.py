"""The parameters and buffers of a rank by logical name; what is tied is there once, with all its names."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from colossus.layout.parameter import LogicalParameter, full_model_order, logical_parameters

#: where an entry stands in the state dict of the whole model: number of its parameter or buffer, number within it
Position = tuple[int, int]


@dataclass(frozen=True)
class Entry:
    """A logical parameter, or a buffer, that this rank holds.

    Attributes:
        names: with the place of each; one that is tied has several, of which the first is the model's first.
    """

    held: LogicalParameter | Tensor
    names: dict[str, Position]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.held.shape)


def entries_of(model: nn.Module) -> dict[str, Entry]:
    """The logical parameters and persistent buffers of this rank by their first names."""
    order = full_model_order(model)
    found: dict[tuple[int, str], Entry] = {}
    for number, logical in enumerate(logical_parameters(model, keep_ties=True)):
        entry = found.setdefault((id(logical.parameter), logical.shard_name), Entry(logical, {}))
        entry.names[logical.name] = order[logical.parameter_name], number
    persistent = model.state_dict(keep_vars=True)
    for name, buffer in model.named_buffers(remove_duplicate=False):
        if name in persistent:
            entry = found.setdefault((id(buffer), ""), Entry(buffer, {}))
            entry.names[name] = order[name], 0
    return {next(iter(entry.names)): entry for entry in found.values()}
