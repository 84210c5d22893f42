"""What makes the host wait for a CUDA device, found on fake tensors."""

from __future__ import annotations

import threading
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_leaves

import colossus
from colossus.sequence_parallel import ring_attention

aten = torch.ops.aten
#: operators whose result decides what the host does: a number, or the size of a tensor
_READS = (
    aten._local_scalar_dense.default,
    aten.equal.default,
    aten.is_nonzero.default,
    aten.nonzero.default,
    aten.masked_select.default,
    aten._unique2.default,
    aten.unique_dim.default,
    aten.unique_consecutive.default,
    aten.repeat_interleave.Tensor,
    aten.bincount.default,
)
#: what writes to its arguments, and knows no fake tensors
_UPDATES = (aten._fused_sgd_.default, aten._fused_sgd_.tensor_lr, aten._fused_adagrad_.default)
#: of a copy to a device from memory that is not pinned, which the driver keeps at once
_STAGED_BYTES = 1 << 16
_COPIES = (aten._to_copy.default, aten.copy_.default, aten.copy.default)
#: the folder of the package, which may itself be in folders of its name
_PACKAGE = f"{Path(colossus.__file__).parent}/"
#: in a wait that was found, between the operation and the line of the package
_AT = " at "


class HiddenWait(AssertionError):
    """The host would wait for the device here."""


class WatchedFakeTensors(FakeTensorMode):
    """Fake tensors; the innermost of the `Waits` that are entered is told of what waits for a device.

    It is one mode and no second one above of it: with another, our collectives would take themselves for recorded, and
    take another way.
    """

    def __init__(self, told: Path) -> None:
        """``told``: a file for errors of backward: on a device's thread autograd loses those of operators."""
        super().__init__(allow_non_fake_inputs=True)
        self._told = told
        self._pinned: set[int] = set()
        #: as of `CountedFakeTensors`
        self.observer: Any = None
        self._depth = 0

    @property
    def avoid_device_init(self) -> bool:
        """Whatever `torch.cuda.is_available` is made to say."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            with torch._C.DisableTorchFunctionSubclass():  # on the main thread torch has done so
                return self._watched(func, types, args, kwargs or {})
        except Exception:
            if threading.current_thread() is not threading.main_thread():
                self._told.write_text(traceback.format_exc())
            raise

    def _watched(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if func in _UPDATES:
            devices = {x.device for x in tree_leaves(args[:3]) if isinstance(x, Tensor) and x.dim()}
            assert len(devices) < 2, f"{func} of tensors on {devices}"
            if self.observer is not None:
                self.observer(func, args, kwargs, None)
            return None
        # as an operator it would be called with meta tensors, and take their branches
        if func is ring_attention.RING_ATTENTION:
            with self:
                return ring_attention._forward(*args, **kwargs)
        if func in _READS and kwargs.get("output_size") is None:
            if any(isinstance(x, Tensor) and x.device.type == "cuda" for x in tree_leaves((args, kwargs))):
                note_wait(str(func))
            if any(isinstance(x, FakeTensor) for x in tree_leaves(args)):
                return _some_result(func, args, kwargs)
        if func in _COPIES:
            self._note_copy(func, args, kwargs)
        self._depth += 1
        try:
            with torch._C.DisableTorchFunction():  # a mode of ours has seen the call; what is inside are meta tensors
                made = super().__torch_dispatch__(func, types, args, kwargs)
        finally:
            self._depth -= 1
        if self.observer is not None and not self._depth:
            self.observer(func, args, kwargs, made)
        if kwargs.get("pin_memory"):
            self._pinned.add(made.untyped_storage()._cdata)
        return made

    def _note_copy(self, func: Any, args: Any, kwargs: Any) -> None:
        """Between the host and a device, unless it is one that nobody waits for: which memory that is pinned has."""
        to = torch.device(kwargs.get("device") or args[0].device)
        source = args[0] if func is _COPIES[0] else args[1]
        if {to.type, source.device.type} != {"cpu", "cuda"}:
            return
        if not (kwargs.get("non_blocking") or (len(args) > 2 and args[2] is True)):
            note_wait(f"{func} from {source.device} to {to}")
            return
        on_host = source if source.device.type == "cpu" else None if func is _COPIES[0] else args[0]
        if to.type == "cuda" and source.nbytes <= _STAGED_BYTES:
            return
        if on_host is None or on_host.untyped_storage()._cdata not in self._pinned:
            note_wait(f"{func}, of memory that is not pinned, from {source.device} to {to}")


def _some_result(func: Any, args: Any, kwargs: Any) -> Any:
    """What it might return: zeros for numbers, and as many elements as there can be."""
    x = args[0]
    if func is aten._local_scalar_dense.default:
        return False if x.dtype is torch.bool else 0.0 if x.is_floating_point() else 0
    if func is aten.equal.default:
        return True
    if func is aten.nonzero.default:
        return x.new_empty((x.numel(), x.dim()), dtype=torch.int64)
    if func is aten._unique2.default:
        where, counts = x.new_empty(x.shape, dtype=torch.int64), x.new_empty(x.numel(), dtype=torch.int64)
        return x.reshape(-1), where, counts
    if func is aten.bincount.default:
        minlength = args[2] if len(args) > 2 else kwargs.get("minlength", 0)
        return x.new_empty(max(minlength, 1), dtype=torch.int64)
    raise NotImplementedError(f"of what size is the result of {func}?")


class Waits:
    """Notes what waits for a device while it is entered.

    To read what an event of an earlier step was recorded behind is none: the host may be one step ahead, and that is
    what bounds it. Which step that was is known where `begin_step` tells.

    Attributes:
        found: one line for each wait: the operation, and the line of the package that called it.
        bounds: of each event of an earlier step that was waited for, how many steps ago it was recorded, and the line.
        allowed: False raises `HiddenWait` at the first.
    """

    _stack: list[Waits] = []
    #: of this process; None: nobody tells when a step begins
    step: int | None = None

    @staticmethod
    def begin_step() -> None:
        """What is recorded from here on belongs to another step."""
        Waits.step = (Waits.step or 0) + 1

    def __init__(self, *, allowed: bool = False) -> None:
        self.allowed = allowed
        self.found: list[str] = []
        self.bounds: list[tuple[int, str]] = []

    def __enter__(self) -> Waits:
        self._stack.append(self)
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.remove(self)

    def note(self, what: str) -> None:
        self.found.append(f"{what}{_AT}{_place()}")
        if not self.allowed:
            raise HiddenWait(self.found[-1])


def files_of(found: list[str]) -> dict[str, int]:
    """File of the package -> how many of the waits that were found are there."""
    return dict(Counter(wait.partition(_AT)[2].partition(":")[0] for wait in found))


def _place(*but: str) -> str:
    """The line of the package that runs, outside of some files."""
    frames = [
        frame
        for frame in traceback.extract_stack()
        if frame.filename.startswith(_PACKAGE) and not frame.filename.endswith(but)
    ]
    if not frames:
        return "outside of the package"
    return f"{frames[-1].filename.removeprefix(_PACKAGE)}:{frames[-1].lineno}: {frames[-1].line}"


def note_wait(what: str) -> None:
    """Something waits for a device."""
    if Waits._stack:
        Waits._stack[-1].note(what)


def note_event(step: int | None) -> None:
    """An event is waited for that was recorded in a step; None: before anybody told when a step begins."""
    if step is None or Waits.step is None:
        return
    if step == Waits.step:
        note_wait("Event.synchronize")
    elif Waits._stack:
        Waits._stack[-1].bounds.append((Waits.step - step, _place("host_transfer.py")))
