"""What to do when a device (or the host) has no memory left, in the words of the config. No torch."""

from __future__ import annotations

import re
from collections.abc import Iterable

from colossus.config import Config

#: of torch's allocators, CUDA, cuBLAS and cuDNN
_MESSAGES = ("out of memory", "can't allocate memory", "_ALLOC_FAILED")
_GIB = {"B": 2.0**-30, "KiB": 2.0**-20, "MiB": 2.0**-10, "GiB": 1.0, "TiB": 2.0**10}


def is_out_of_memory(messages: Iterable[str]) -> bool:
    """Whether an error, or one behind it, says so."""
    return any(word in message for message in messages for word in _MESSAGES)


def advise(config: Config, message: str, step: int | None) -> str:
    """Lines on what takes less memory than this config, most useful first.

    Args:
        message: of the error, which has the numbers.
        step: that was running, None before the first.
    """
    ways = [*_of_the_allocator(message), *(_of_activations(config) if step is not None else []), *_of_states(config)]
    own = r"Process \d+ has ([\d.]+ [KMGT]?i?B) memory in use"
    if others := re.findall(own, message):
        ways.insert(0, f"other processes hold {', '.join(others)} of this device: `nvidia-smi` names them")
    when = "while the model was made or loaded" if step is None else f"in step {step}"
    return "\n".join([f"out of memory {when}; what takes less:", *(f"  - {way}" for way in ways)])


def _of_the_allocator(message: str) -> list[str]:
    """Where much memory is held, but in pieces too small."""
    held = re.search(r"([\d.]+) ([KMGT]?i?B) is reserved by PyTorch but unallocated", message)
    used = re.search(r"([\d.]+) ([KMGT]?i?B) is allocated by PyTorch", message)
    if held is None or used is None or _gib(held) < 0.1 * _gib(used):
        return []
    pieces = f"{held[1]} {held[2]} are reserved in pieces that do not fit"
    return [f"{pieces}: PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"]


def _gib(found: re.Match[str]) -> float:
    return float(found[1]) * _GIB.get(found[2], 1.0)


def _of_activations(config: Config) -> list[str]:
    train, microbatches = config.train, config.schedule.microbatches
    ways = []
    if train.activation_checkpoint.type != "full":
        ways.append("train.activation_checkpoint=full: a block's activations are computed again in backward")
    elif not train.activation_checkpoint.offload and config.device != "cpu":
        ways.append("train.activation_checkpoint.offload=True: what is kept waits in the memory of the host")
    each = train.global_batch_size // (config.parallel.data or 1) // microbatches
    if each > 1:
        more = next(count for count in range(2, each + 1) if each % count == 0) * microbatches
        ways.append(f"schedule.microbatches={more} (now {microbatches}): fewer samples at a time, the same batch")
    if train.precision.name == "fp32":
        ways.append("train.precision=bf16: activations of half the size")
    return ways


def _of_states(config: Config) -> list[str]:
    parallel = config.parallel
    data, stage = parallel.data or 1, parallel.zero.stage
    ways = []
    if data > 1 and stage < 3 and (stage or parallel.strategy.type in _EXACT):
        ways.append(
            f"parallel.zero.stage={stage + 1} (now {stage}): {_SHARDED[stage]} shared out over {data} data ranks"
        )
    if stage and not parallel.zero.offload and config.device != "cpu":
        ways.append("parallel.zero.offload=True: what the optimizer keeps lies in the memory of the host")
    size = parallel.tensor.size
    ways.append(f"a larger parallel.tensor.size (now {size}) or parallel.pipeline.size (now {parallel.pipeline.size})")
    return ways


#: strategies under which ZeRO may share out what replicas keep
_EXACT = ("all_reduce", "hierarchical")
_SHARDED = ("the optimizer's state is", "gradients are, too,", "parameters are, too,")
