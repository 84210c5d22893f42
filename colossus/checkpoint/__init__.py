"""State by logical name and full shape, whatever the plan."""

from typing import TYPE_CHECKING

from colossus._lazy import lazy_names

if TYPE_CHECKING:
    from colossus.checkpoint.state_dict import full_state_dict, load_full_state_dict

__all__ = ["full_state_dict", "load_full_state_dict"]

__getattr__, __dir__ = lazy_names(__name__, {"full_state_dict": "state_dict", "load_full_state_dict": "state_dict"})
