"""A record of somebody's training loop: the values of its first steps, written by each rank, for ``colossus verify``.

The loop stays as it is. Hooks of the model see its forwards, hooks of torch's optimizers see the updates, and torch's
clipping tells the norm, so that loops of FSDP2, DTensor, DDP, accelerate or transformers' Trainer need no change.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from fnmatch import fnmatchcase
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from colossus.nest import tensors_within
from colossus.verify.fingerprints import row_fingerprints, sample_keys
from colossus.verify.foreign_parts import Names, SplitOf, logical_name, parts_of
from colossus.verify.record_folder import Forward, Part, StepRecord, refuse_old_record, write_step


def record(
    folder: str | Path,
    model: nn.Module,
    *,
    steps: int = 3,
    outputs: Sequence[str] = ("*",),
    names: Names = None,
    split: SplitOf = None,
) -> Recording:
    """Record the first steps of a training loop into a folder, for ``colossus verify FOLDER OTHER``.

    Every rank calls it around its loop, under torchrun or any other launcher::

        with record("run.verify", model) as recording:
            for batch in loader:
                ...  # forward, backward, clipping, optimizer.step(), as they are

    After so many steps the hooks are gone and the loop goes on without them; ``recording.is_done`` may end it.

    Recorded are the samples that the model gets, outputs of its modules (two numbers a sample), losses, the gradients
    of all parameters before clipping, their norm, and the parameters at the start and after each step. A parameter is
    recorded by its name and its place in the whole: DTensors (FSDP2, torch's tensor parallelism) by their placements,
    parameters of Megatron by their attributes, those of DeepSpeed's ZeRO by its own functions, others as whole ones.

    Args:
        folder: folder of the record; all ranks see the same one (a shared file system, on several machines).
        model: the model whose forward the loop calls, wrapped or not; on a pipeline rank its stage.
        steps: steps that are recorded.
        outputs: patterns (as of a shell) of the names of modules whose outputs are recorded.
        names: the parameter's name in one process from the name in this model: a function, or prefix -> prefix, for
            stages of a pipeline that number their layers from 0. Prefixes of known wrappers are left out anyhow.
        split: (name, parameter) -> (dim, index, count) where this rank has the part ``index`` of ``count`` of a
            parameter that is split along ``dim`` by the loop's own code; (dim, index, count, blocks) where it is fused
            of so many blocks (q, k and v) that are split each; None for a whole one.

    Raises:
        FileExistsError: the folder has a record.
    """
    return Recording(Path(folder), model, steps, outputs, names, split)


class Recording:
    """A recording that runs while its ``with`` block does; see `record`."""

    def __init__(
        self, folder: Path, model: nn.Module, steps: int, outputs: Sequence[str], names: Names, split: SplitOf
    ) -> None:
        self._folder, self._model, self._steps, self._outputs = folder, model, steps, tuple(outputs)
        self._names, self._split = names, split
        self._hooks = ExitStack()
        self._step = StepRecord(0)
        self._in_forward = self._took_gradients = False
        self.is_done = False

    def __enter__(self) -> Recording:
        distributed = dist.is_available() and dist.is_initialized()
        self._rank = dist.get_rank() if distributed else int(os.environ.get("RANK", "0"))
        self._world = dist.get_world_size() if distributed else int(os.environ.get("WORLD_SIZE", "1"))
        refuse_old_record(self._folder, self._rank)
        self._step.parts += self._parameters("weight")
        self._write()
        self._step = StepRecord(1)
        model = self._model
        self._keep(model.register_forward_pre_hook(self._before_forward, with_kwargs=True, prepend=True))
        for name, module in model.named_modules(remove_duplicate=False):
            if name and any(fnmatchcase(logical_name(name, self._names), pattern) for pattern in self._outputs):
                self._keep(module.register_forward_hook(functools.partial(self._after_module, name)))
        self._keep(model.register_forward_hook(self._after_forward))
        self._keep(register_optimizer_step_pre_hook(lambda *_: self.gradients()))
        self._keep(register_optimizer_step_post_hook(lambda *_: self._after_update()))
        self._watch_clipping()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if not self.is_done and self._took_gradients:
            self._finish_step()
        self._close()

    # -- what a loop may tell itself --------------------------------------------------------------------------

    def loss(self, loss: Tensor | float, count: Tensor | float | None = None) -> None:
        """Record the loss of the last forward, where the model's output does not have it as ``loss``.

        Args:
            loss: the loss of this rank and microbatch, as a mean over its tokens (or samples).
            count: the number of its valid tokens (or samples); without it the means of all forwards count equally.
        """
        if self.is_done:
            return
        if not self._step.forwards:
            raise ValueError("recording.loss: no forward of the recorded model came before; call it after the forward")
        forward = self._step.forwards[-1]
        forward.loss = float(loss.detach()) if isinstance(loss, Tensor) else float(loss)
        forward.count = None if count is None else float(count)

    def gradients(self) -> None:
        """Record the gradients of this step as they are now.

        Torch's clipping and any optimizer's step call it. A loop that clips by its own code calls it before.
        """
        if self.is_done or self._took_gradients or not self._step.forwards:
            return
        self._took_gradients = True
        self._step.parts += self._parameters("gradient")

    def norm(self, norm: Tensor | float) -> None:
        """Record the norm of all gradients before clipping, where the loop computes it by its own code."""
        if not self.is_done:
            value = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
            self._step.norm = float(value)

    # -- hooks ------------------------------------------------------------------------------------------------

    def _before_forward(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if not torch.is_grad_enabled():
            return
        if self._took_gradients:
            self._finish_step()
        if self.is_done:
            return
        self._in_forward = True
        inputs = {**{str(number): value for number, value in enumerate(args)}, **kwargs}
        self._step.forwards.append(Forward(sample_keys(inputs)))

    def _after_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        if not self._in_forward:
            return
        self._after_module("", module, args, output)
        self._in_forward = False
        loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
        if isinstance(loss, Tensor) and loss.numel() == 1:
            self._step.forwards[-1].loss = float(loss.detach())

    @torch.no_grad()
    def _after_module(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        """Record the output of a call in a forward; a recomputation in backward is none."""
        if not self._in_forward:
            return
        forward = self._step.forwards[-1]
        values = [x for x in tensors_within(output) if x.is_floating_point()]
        for number, value in enumerate(values):
            self._step.dtypes.add(str(value.dtype).removeprefix("torch."))
            whole = value.full_tensor() if hasattr(value, "full_tensor") else value.detach()
            if whole.dim() and len(whole) == len(forward.samples):
                title = logical_name(name, self._names) or "the model"
                title += f", output {number + 1}" if len(values) > 1 else ""
                forward.add(title, list(whole.shape[1:]), row_fingerprints(whole))

    def _after_update(self) -> None:
        if self._took_gradients and not self.is_done:  # several optimizers: the last one's values stay
            self._step.parts = [part for part in self._step.parts if part.kind != "weight"]
            self._step.parts += self._parameters("weight")

    def _watch_clipping(self) -> None:
        """Take gradients and norm where torch's functions clip, also for those that call them by their module."""

        def taking(function: Callable[..., Any], norm_of: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(function)
            def clip(*args: Any, **kwargs: Any) -> Any:
                self.gradients()
                result = function(*args, **kwargs)
                self.norm(norm_of(result, *args, **kwargs))
                return result

            return clip

        def returned(result: Any, *args: Any, **kwargs: Any) -> Any:
            return result

        def passed(result: Any, parameters: Any, max_norm: float, total_norm: Any, *args: Any, **kwargs: Any) -> Any:
            return total_norm

        for module, name, norm_of in (
            (torch.nn.utils, "clip_grad_norm_", returned),
            (torch.nn.utils.clip_grad, "clip_grad_norm_", returned),
            (torch.nn.utils, "clip_grads_with_norm_", passed),
        ):
            function = getattr(module, name)
            self._hooks.callback(setattr, module, name, function)
            setattr(module, name, taking(function, norm_of))

    # -- a step -----------------------------------------------------------------------------------------------

    def _parameters(self, kind: str) -> list[Part]:
        parts = []
        for name, parameter in self._model.named_parameters():
            if parameter.requires_grad:
                parts += parts_of(kind, logical_name(name, self._names), parameter, self._split)
        return parts

    def _finish_step(self) -> None:
        if all(part.kind != "weight" for part in self._step.parts):  # no optimizer of torch has stepped
            self._step.parts += self._parameters("weight")
        self._write()
        self._took_gradients = False
        self._step = StepRecord(self._step.number + 1)
        if self._step.number > self._steps:
            self._close()

    def _write(self) -> None:
        write_step(self._folder, self._rank, self._world, self._step)

    def _keep(self, handle: Any) -> None:
        self._hooks.callback(handle.remove)

    def _close(self) -> None:
        self._hooks.close()
        self.is_done = True
