"""What to do when a device (or the host) has no memory left, in the words of the config. No torch."""

from __future__ import annotations

import re
from collections.abc import Iterable

from colossus.config import Config

#: of torch's allocators, CUDA, cuBLAS and cuDNN
_MESSAGES = ("out of memory", "can't allocate memory", "_ALLOC_FAILED")


def is_out_of_memory(messages: Iterable[str]) -> bool:
    """Whether an error, or one behind it, says so."""
    return any(word in message for message in messages for word in _MESSAGES)


def advise(config: Config, message: str, step: int | None) -> str:
    """Lines on what takes less memory than this config, most useful first.

    Args:
        message: of the error, which has the numbers.
        step: that was running, None before the first.
    """
    train, parallel, microbatches = config.train, config.parallel, config.schedule.microbatches
    data, stage, size = parallel.data or 1, parallel.zero.stage, parallel.tensor.size
    ways = []
    if others := re.findall(r"Process \d+ has ([\d.]+ [KMGT]?i?B) memory in use", message):
        ways.append(f"other processes hold {', '.join(others)} of this device: `nvidia-smi` names them")
    if held := re.search(r"([\d.]+ [GT]iB) is reserved by PyTorch but unallocated", message):
        ways.append(f"{held[1]} are reserved in pieces too small: PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True")
    if step is not None:
        if train.activation_checkpoint.type != "full":
            ways.append("train.activation_checkpoint=full: a block's activations are computed again in backward")
        if train.global_batch_size // data > microbatches:
            ways.append(f"more schedule.microbatches (now {microbatches}): fewer samples at a time, the same batch")
        if train.precision.name == "fp32":
            ways.append("train.precision=bf16: activations of half the size")
    if data > 1 and stage < 3 and (stage or parallel.strategy.type in ("all_reduce", "hierarchical")):
        ways.append(f"parallel.zero.stage={stage + 1} (now {stage}): more is sharded over {data} data ranks")
    ways.append(f"a larger parallel.tensor.size (now {size}) or parallel.pipeline.size (now {parallel.pipeline.size})")
    when = "while the model was made or loaded" if step is None else f"in step {step}"
    return "\n".join([f"out of memory {when}; what takes less:", *(f"  - {way}" for way in ways)])
