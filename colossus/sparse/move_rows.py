"""Rows of an owned table change hands."""

from __future__ import annotations

import torch
from torch import Tensor

from colossus.comm import uneven
from colossus.context.groups import AxisGroup
from colossus.layout.parameter import StoredSpec, spec_of
from colossus.sparse.placement import Placement
from colossus.sparse.ways.owners import Owners


def move_rows(table: Owners, placement: Placement, group: AxisGroup, optimizer: torch.optim.Optimizer) -> None:
    """Give rows of a table, with what the optimizer keeps for each, to the owners that a placement says. Collective.

    Args:
        group: the owners.
    """
    param, device = table.param, table.param.device
    held = rows_of(table.placement, group.index, device)
    owners = placement.owners_of(held.cpu().numpy())
    to = torch.from_numpy(owners).to(device)
    order, counts = torch.argsort(to, stable=True), torch.bincount(to, minlength=group.size).tolist()
    stored, state = param.shape[0], optimizer.state.get(param, {})
    of_rows = [key for key, value in state.items() if isinstance(value, Tensor) and value.shape[:1] == (stored,)]
    lengths, heard = uneven.agree(counts, group, device, [len(of_rows)])
    assert all(words == heard[0] for words in heard), "owners keep different state"
    ids = uneven.all_to_all(held[order], lengths, group, "placed ids").wait()
    into = torch.argsort(ids)

    def moved(x: Tensor) -> Tensor:
        return uneven.all_to_all(x.detach()[: len(held)][order], lengths, group, "placed rows").wait()[into]

    spec = spec_of(param)
    assert isinstance(spec, StoredSpec)
    with torch._C.DisableTorchFunctionSubclass():  # a `SplitParameter` is here what it is
        for key in of_rows:
            state[key] = moved(state[key])
        param.data = moved(param.data)
    spec.place(placement.intervals(group.index))
    table.place(placement)


def rows_of(placement: Placement, owner: int, device: torch.device) -> Tensor:
    """The rows that an owner stores, in the order in which it does."""
    parts = [torch.arange(start, stop, device=device) for start, stop in placement.intervals(owner)]
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64, device=device)
