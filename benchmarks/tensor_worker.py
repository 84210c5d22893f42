"""A rank of the tensor-mode benchmark: it compares, counts and times its block, and measures memory."""

from __future__ import annotations

from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from benchmarks import memory
from benchmarks.tensor_block import RUNS, ColossusRun, Counted, Owed, Run, cut, local_part
from benchmarks.tensor_cases import Case
from benchmarks.timing import PeakOnDevice, seconds_per_call
from benchmarks.workload import Workload
from colossus.comm import shared_memory

#: what a block computes -> whole values, query, key and value fused
Values = dict[str, "np.ndarray[Any, np.dtype[np.float32]]"]


class Worker:
    """A case on one rank, for a `RankGroup`. The block is made at the first use, so that `peak` sees its making."""

    def __init__(self, case: Case, workload: Workload, use_shared_memory: bool, rank: int) -> None:
        shared_memory.enable(use_shared_memory)
        self.device = torch.device(workload.device)
        self.make = partial(RUNS.get(case.mode, ColossusRun), case, workload, rank)

    @cached_property
    def run(self) -> Run:
        return self.make()

    def reference(self) -> Values:
        return {name: value.cpu().numpy() for name, value, _ in self.run.values()}

    def gaps(self, reference: Values) -> dict[str, float]:
        """Return the largest difference from the reference, by name, over the largest value there (or 1)."""
        gaps = {}
        for name, value, box in self.run.values():
            want = torch.from_numpy(reference[name])
            gaps[name] = ((value.cpu() - cut(want, box)).abs().max() / want.abs().max().clamp(min=1.0)).item()
        return {name: gaps.get(name, float("nan")) for name in reference}

    def block(self, count: int) -> float:
        """Return seconds per step; the first is not timed: caches hold what another case left there."""
        return seconds_per_call(self.run.step, self.device, count)

    def count(self) -> Counted:
        return self.run.count()

    def count_step(self, microbatches: int, scope: str) -> Counted:
        run = self.run
        assert isinstance(run, ColossusRun)
        return run.count_step(microbatches, scope)

    def owed(self) -> Owed:
        return self.run.owed()

    def num_parameters(self) -> int:
        """Return the number of parameters that this rank stores."""
        return sum(shard.numel() for shard in self.run.shards())

    def saved(self) -> int:
        """Return the bytes that forward keeps for backward, without the parameters as stored: each storage once."""
        stored = {shard.untyped_storage().data_ptr() for shard in self.run.shards()}
        storages: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            storage = local_part(tensor).untyped_storage()
            if storage.data_ptr() not in stored:
                storages[storage.data_ptr()] = storage.nbytes()
            return tensor

        with saved_tensors_hooks(pack, lambda tensor: tensor):
            y = self.run.forward()
        y.backward(self.run.dy)  # what was saved lived until here: no address was used twice
        return sum(storages.values())

    def peak(self) -> int | None:
        """Return the bytes at the peak of a step: parameters, x and dy with gradients, and what the step adds.

        Slots of shared memory are left out: they are as large for any block. None where the system does not tell. What
        a step adds is counted by the allocator on a CUDA device.
        """
        added = self._added_on_device() if self.device.type == "cuda" else self._added_on_host()
        run = self.run
        return None if added is None else 2 * sum(shard.nbytes for shard in run.shards()) + 3 * run.dy.nbytes + added

    def _added_on_device(self) -> int | None:
        self.run.step()  # gradients are there from here on, as after every step
        with PeakOnDevice(self.device) as peak:
            self.run.step()
        return peak.bytes

    def _added_on_host(self) -> int | None:
        used = memory.measure(lambda: self.run)  # type: ignore[arg-type,return-value]  # its step gives no loss
        return None if used is None else used.peak - used.resident

    def close(self) -> None:
        """Destroy its groups; others may be made then."""
        if "run" in vars(self):
            self.run.close()
