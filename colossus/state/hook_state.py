"""What hooks keep: the same on all ranks, or (of a rank's shards, say) each rank's own.

That of rank 0 is saved; a rank whose hook gave something else has its own beside it, and takes it back under the plan
of the checkpoint. All others take that of rank 0.
"""

from __future__ import annotations

import contextlib
import json
import logging
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from colossus.checkpoint.errors import CheckpointError, in_words
from colossus.checkpoint.reader import CheckpointReader
from colossus.checkpoint.tensor_file import host_bytes
from colossus.checkpoint.values import decode, encode
from colossus.context.parallel_context import ParallelContext
from colossus.state.of_ranks import of_ranks
from colossus.state.run import Stateful

log = logging.getLogger("colossus.engine")


@dataclass(frozen=True)
class EncodedState:
    """State as it was given, as JSON, and the tensors of it by key, which begin with ``path``."""

    given: Any
    path: str
    value: Any
    tensors: Mapping[str, Tensor]

    @classmethod
    def of(cls, state: Any, path: str) -> EncodedState:
        tensors: dict[str, Tensor] = {}
        return cls(state, path, encode(state, path, tensors), tensors)

    def under(self, path: str) -> EncodedState:
        """The same with another path."""
        return self.of(self.given, path)

    def checksum(self) -> int:
        crc = zlib.crc32(json.dumps(self.value).encode())
        for tensor in self.tensors.values():
            crc = zlib.crc32(host_bytes(tensor), crc)
        return crc


class SavedHook(Stateful, Protocol):
    """A hook as a checkpoint sees it."""

    def on_save(self, engine: Any) -> None: ...


class HookStates:
    """The hooks of a run, and what a checkpoint has of hooks that are not there yet.

    Args:
        owner: what hooks are called with: the engine.

    Attributes:
        hooks: whose ``state_dict`` belongs to the run. Those that are set after a load, and before the next step, take
            what was saved.
    """

    def __init__(self, context: ParallelContext, owner: Any) -> None:
        self._context, self._owner = context, owner
        self._hooks: list[SavedHook] = []
        #: by name, decoded
        self._untaken: dict[str, Any] = {}

    @property
    def hooks(self) -> list[SavedHook]:
        return self._hooks

    @hooks.setter
    def hooks(self, hooks: Sequence[SavedHook]) -> None:
        self._hooks = list(hooks)
        self._give()

    def before_save(self) -> None:
        for name, hook in _by_name(self._hooks):
            with _naming(name, "on_save"):
                hook.on_save(self._owner)

    def collect(self) -> dict[str, EncodedState]:
        """What each hook of this rank gives, if it gives anything, by path."""
        states = {}
        for name, hook in _by_name(self._hooks):
            with _naming(name, "state_dict"):
                state = hook.state_dict()
                if state:
                    path = f"hooks/{name}"
                    states[path] = EncodedState.of(state, path)
        return states

    def restore(self, reader: CheckpointReader, *, is_same_plan: bool, was_trained: bool) -> None:
        """Give hooks of the same name and number what was saved; keep what nobody takes for those that come.

        Args:
            was_trained: the engine has done steps before this load.
        """
        self._untaken = _saved_states(reader, self._context, is_same_plan=is_same_plan)
        if was_trained:
            self._warn_of_kept()
        self._give()

    def forget_untaken(self) -> None:
        """A step begins: a hook that came later would take what is out of date."""
        if self._untaken and self._context.is_logging_rank:
            log.warning(
                "the checkpoint has state of hooks that this run does not have: %s. It is dropped; to take it, give "
                "the hooks to fit, or set run.checkpoints.hooks, before the first step",
                ", ".join(self._untaken),
            )
        self._untaken = {}

    def _give(self) -> None:
        for name, hook in _by_name(self._hooks) if self._untaken else ():
            if name in self._untaken:
                with _naming(name, "load_state_dict"):
                    hook.load_state_dict(self._untaken.pop(name))

    def _warn_of_kept(self) -> None:
        for name, hook in _by_name(self._hooks):
            if name not in self._untaken:
                with _naming(name, "state_dict"):
                    keeps = bool(hook.state_dict())
                if keeps and self._context.is_logging_rank:
                    log.warning(
                        "the checkpoint has no state of the hook %s: it keeps that of the steps behind it", name
                    )


def _saved_states(reader: CheckpointReader, context: ParallelContext, *, is_same_plan: bool) -> dict[str, Any]:
    """What this rank takes of a checkpoint, by the names of hooks."""
    values, states = reader.manifest.values, {}
    names = dict.fromkeys(path.rpartition("hooks/")[2] for path in values if _is_of_hook(path))
    for name in names:
        own, value = of_ranks(values, f"hooks/{name}"), values.get(f"hooks/{name}")
        if is_same_plan:
            value = own.get(context.rank, value)
        elif own and context.is_logging_rank:
            log.warning(
                "what the hook %s kept differed between ranks, and the plan is another now: all take that of rank 0",
                name,
            )
        if value is not None:
            states[name] = decode(value, reader.tensor)
    return states


def _is_of_hook(path: str) -> bool:
    root, _, rest = path.partition("/")
    return root == "hooks" or (root == "ranks" and rest.partition("/")[2].startswith("hooks/"))


@contextlib.contextmanager
def _naming(name: str, method: str) -> Iterator[None]:
    """What a hook raises says which hook it was."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(f"the hook {name}: {method}: {in_words(error)}") from error


def _by_name(hooks: Sequence[SavedHook]) -> list[tuple[str, SavedHook]]:
    """By the name of the class; of several of one name by their number, too.

    A class inside of another is ``Outer:Inner``: what follows a dot is the hook's own.
    """
    named: list[tuple[str, SavedHook]] = []
    counts: Counter[str] = Counter()
    for hook in hooks:
        name = type(hook).__qualname__.replace(".", ":")
        counts[name] += 1
        named.append((f"{name}~{counts[name]}" if counts[name] > 1 else name, hook))
    return named
