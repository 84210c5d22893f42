"""Types of ours that a tensor is given after it was made."""

from __future__ import annotations

import types
from functools import lru_cache

from torch import Tensor

_OPERATIONS = Tensor.__torch_dispatch__


def set_kind(x: Tensor, kind: type[Tensor]) -> None:
    """Let ``x`` be a ``kind``. A tensor whose type computes by itself, as that of torch's fake tensors does, stays of
    that type, too: what is done with it goes through ``kind`` first.
    """
    below = getattr(type(x), "_below", type(x))
    x.__class__ = kind if below.__torch_dispatch__ is _OPERATIONS else _both(kind, below)


@lru_cache(maxsize=64)
def _both(kind: type[Tensor], below: type[Tensor]) -> type[Tensor]:
    if kind is below:
        return below
    return types.new_class(
        f"{kind.__name__}{below.__name__}", (kind, below), exec_body=lambda names: names.update(_below=below)
    )
