"""Ranks with CUDA devices that do not exist: fake tensors (shapes, dtypes and devices without values) on device
``cuda``, and torch's fake process group, in a forked process that is thrown away.

What such a rank sees: a tensor on the wrong device raises, and so does whatever would wait for the device
(`HiddenWait`). What it cannot see: values, and whether streams are in order.
"""

from helpers.fake_cuda.ranks import batch_on_device, run_fake_ranks
from helpers.fake_cuda.waits import HiddenWait, Waits, files_of

__all__ = ["HiddenWait", "Waits", "batch_on_device", "files_of", "run_fake_ranks"]
