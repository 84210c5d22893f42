"""A process that takes itself for one with CUDA devices, as far as fake tensors need it.

Autograd asks the device guard of a device for streams, and which accelerator there is. A build of torch for CPU has
neither for CUDA, and a build for CUDA has ones that need a driver. The guard is one of torch's own for Python backends,
put where that of CUDA belongs; the answer to "is CUDA built?" is changed in the table of virtual functions. Both are of
this process alone, which ends with its test.
"""

from __future__ import annotations

import ctypes
import os
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from helpers.fake_cuda.waits import Waits, note_event, note_wait
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

from colossus.planner.fake_tensors import as_subclass, set_attribute

#: the device of every rank, each on a machine of its own: autograd makes a thread for one device alone
DEVICE = torch.device("cuda", 0)
_CUDA, _PRIVATE_USE_1 = 1, 20
#: places in the virtual table of `at::AcceleratorHooksInterface`, behind its two destructors
_IS_BUILT, _IS_AVAILABLE, _HAS_PRIMARY_CONTEXT = 2, 3, 4
_TABLE_SIZE = 64
_kept: list[Any] = []
_of_tests = os.getpid()


def pretend() -> None:
    """From here on this process has CUDA devices, on which fake tensors can be and autograd can run."""
    assert os.getpid() != _of_tests, "what is pretended cannot be taken back: only a forked process may"
    registry = _guards()
    registry[_CUDA] = None  # of a build for CUDA, which would count the devices that there are
    torch.ones((), requires_grad=True).backward()  # autograd counts devices once, and there are none yet
    _set_guard(registry)
    _set_hooks()
    _start_device_thread()
    fake_tensor.init_gpu_context = lambda device: None
    found = torch.accelerator.current_accelerator()
    assert found is not None, "this torch is built otherwise than the one that the tests are pinned to"
    assert found.type == "cuda"
    _set_functions()


def _library(name: str) -> ctypes.CDLL:
    return ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / name))


def _guards() -> Any:
    """The device guards of this process, by type of device."""
    return (ctypes.c_void_p * (_PRIVATE_USE_1 + 1)).in_dll(
        _library("libc10.so"), "_ZN3c104impl26device_guard_impl_registryE"
    )


def _set_guard(registry: Any) -> None:
    class Guard(torch._C._acc.DeviceGuard):
        def type_(self) -> Any:
            return torch._C._autograd.DeviceType.CUDA

    guard = Guard()
    _kept.append(guard)
    torch._C._acc.register_python_privateuseone_device_guard(guard)
    registry[_CUDA], registry[_PRIVATE_USE_1] = registry[_PRIVATE_USE_1], None


def _set_hooks() -> None:
    get_hooks = _library("libtorch_cpu.so")["_ZN2at6detail12getCUDAHooksEv"]
    get_hooks.restype = ctypes.c_void_p
    hooks = ctypes.cast(get_hooks(), ctypes.POINTER(ctypes.c_void_p))
    table = (ctypes.c_void_p * _TABLE_SIZE)(*(ctypes.c_void_p * _TABLE_SIZE).from_address(hooks[0]))
    yes = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p)(lambda this: True)
    no = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p, ctypes.c_int8)(lambda this, index: False)
    for place, function in ((_IS_BUILT, yes), (_IS_AVAILABLE, yes), (_HAS_PRIMARY_CONTEXT, no)):
        table[place] = ctypes.cast(function, ctypes.c_void_p).value
    _kept.extend((table, yes, no))
    hooks[0] = ctypes.addressof(table)


def _start_device_thread() -> None:
    """The thread of autograd for the device: what it would have started, had it counted now."""
    library = _library("libtorch_cpu.so")
    engine = library["_ZN5torch8autograd6Engine18get_default_engineEv"]
    engine.restype = ctypes.c_void_p
    start = library["_ZN5torch8autograd6Engine20start_device_threadsEv"]
    start.argtypes, start.restype = [ctypes.c_void_p], None
    start(engine())


class FakeStream:
    """Of `torch.cuda.Stream` what may be called without waiting; what waits is noted."""

    def __init__(self, device: Any = None, priority: int = 0, **options: Any) -> None:
        self.device = DEVICE if device is None else torch.device(device)
        self.cuda_stream = self.stream_id = id(self)

    def wait_stream(self, other: FakeStream) -> None:
        assert isinstance(other, FakeStream)

    def wait_event(self, event: FakeEvent) -> None:
        assert event.is_recorded, "a stream waits for an event that was not recorded"

    def record_event(self, event: FakeEvent | None = None) -> FakeEvent:
        event = event or FakeEvent()
        event.record(self)
        return event

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        note_wait("Stream.synchronize")

    def __enter__(self) -> FakeStream:
        _streams.append(self)
        return self

    def __exit__(self, *error: object) -> None:
        _streams.remove(self)


class FakeEvent:
    """An event that has happened. To wait for one of the step that runs is noted as a wait, of an earlier one as what
    bounds the host (`Waits.begin_step`)."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self.is_recorded = False
        self._step: int | None = None

    def record(self, stream: FakeStream | None = None) -> None:
        self.is_recorded, self._step = True, Waits.step

    def wait(self, stream: FakeStream | None = None) -> None:
        assert self.is_recorded

    def query(self) -> bool:
        return self.is_recorded

    def synchronize(self) -> None:
        assert self.is_recorded, "an event is waited for that was not recorded"
        note_event(self._step)

    def elapsed_time(self, end: FakeEvent) -> float:
        return 1.0


_streams: list[FakeStream] = []


#: of the state of a generator
_RNG_BYTES = {"cpu": 5056, "cuda": 16}


class _FakeGenerator(torch.Generator):
    """On the CPU whatever was asked for: fake tensors draw nothing, and only look that there is one."""

    def __new__(cls, device: Any = "cpu") -> _FakeGenerator:
        made: _FakeGenerator = super().__new__(cls)
        made.wanted = torch.device(device)  # type: ignore[misc]
        return made

    def get_state(self) -> torch.Tensor:
        return torch.zeros(_RNG_BYTES[self.wanted.type], dtype=torch.uint8)  # type: ignore[attr-defined]

    def set_state(self, state: torch.Tensor) -> _FakeGenerator:  # type: ignore[override]
        """As torch wants it: of every device on the host."""
        assert state.dtype is torch.uint8
        assert state.device.type == "cpu", f"the state of a generator is on {state.device}"
        assert state.shape == (_RNG_BYTES[self.wanted.type],), "the state of a generator of another device"  # type: ignore[attr-defined]
        return self


def _set_functions() -> None:
    default = FakeStream()

    def set_device(device: Any) -> None:
        assert device == 0 or torch.device(device) == DEVICE

    @contextmanager
    def stream(on: FakeStream | None) -> Any:
        with on or default:
            yield

    replaced = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "init": lambda: None,
        "_lazy_init": lambda: None,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": set_device,
        "get_device_name": lambda device=None: "NVIDIA H100 80GB HBM3",
        "get_device_capability": lambda device=None: (9, 0),
        "is_bf16_supported": lambda *args, **options: True,
        "max_memory_allocated": lambda device=None: 0,
        "memory_allocated": lambda device=None: 0,
        "max_memory_reserved": lambda device=None: 0,
        "memory_stats_as_nested_dict": lambda device=None: {},
        "reset_peak_memory_stats": lambda device=None: None,
        "empty_cache": lambda: None,
        "synchronize": lambda device=None: note_wait("torch.cuda.synchronize"),
        "Stream": FakeStream,
        "Event": FakeEvent,
        "current_stream": lambda device=None: _streams[-1] if _streams else default,
        "default_stream": lambda device=None: default,
        "stream": stream,
        "default_generators": (generator := _FakeGenerator(DEVICE),),
        "get_rng_state": lambda device=None: generator.get_state(),
        "set_rng_state": lambda state, device=None: generator.set_state(state),
    }
    for name, value in replaced.items():
        setattr(torch.cuda, name, value)
    torch.accelerator.synchronize = lambda device=None: note_wait("torch.accelerator.synchronize")  # type: ignore[assignment]
    torch.Generator = _FakeGenerator  # type: ignore[misc, assignment]
    torch.default_generator = _FakeGenerator()
    torch.Tensor.record_stream = _record_stream  # type: ignore[method-assign]
    torch.Tensor.numpy = _numpy  # type: ignore[method-assign]
    FakeTensor.tolist = _tolist  # type: ignore[method-assign]
    FakeTensor.as_subclass = as_subclass  # type: ignore[method-assign, assignment]
    FakeTensor.__setattr__ = set_attribute  # type: ignore[method-assign, assignment]


def _record_stream(self: torch.Tensor, stream: FakeStream) -> None:
    assert self.device.type == "cuda", f"record_stream of a tensor on {self.device}"
    assert isinstance(stream, FakeStream)


_real_numpy = torch.Tensor.numpy


def _numpy(self: torch.Tensor, *, force: bool = False) -> np.ndarray:
    """Zeros for a fake tensor on the CPU: a value that nobody knows."""
    if not isinstance(self, FakeTensor):
        return _real_numpy(self, force=force)
    if self.device.type != "cpu":
        raise TypeError(f"can't convert {self.device} device type tensor to numpy")
    with unset_fake_temporarily():
        return _real_numpy(torch.zeros(self.shape, dtype=self.dtype))


def _tolist(self: FakeTensor) -> Any:
    """Zeros, by one copy: torch would read element by element."""
    if self.device.type == "cuda":
        note_wait("tolist")
    with unset_fake_temporarily():
        return torch.zeros(self.shape, dtype=self.dtype).tolist()
