"""The hooks of the two runs: one process writes the values of each step, the run under the plan compares its own."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from colossus.checkpoint.part import Part
from colossus.engine.engine import Engine
from colossus.engine.fit import Hook
from colossus.engine.results import StepResult
from colossus.gradients.gradient_axes import gradient_sum_axes
from colossus.layers.model_parallel import model_parallel_of
from colossus.layout.parameter import logical_parameters
from colossus.schedule.executor import StepObserver
from colossus.verify.capture import (
    ForwardCapture,
    Output,
    Shard,
    disable_torch_dropout,
    parameter_shards,
    weight_shards,
)
from colossus.verify.rounding import FLOOR, norm_of
from colossus.verify.verify_report import Finding

#: the bounds of rounding: `SMALL` is a fraction of the root mean square of a parameter's gradient, `NOISE` of that of
#: all gradients. An element below either may consist mostly of rounding errors.
SMALL, NOISE = 1e-6, 1e-9


class Recorder(Hook, StepObserver):
    """A hook that turns torch's own dropout off and sees the values of every step of a run.

    It takes the gradients before the optimizer sees them, and divides them by the factor of clipping. That factor
    follows from the global norm, so that one wrong gradient would otherwise change all of them.
    """

    def on_train_start(self, engine: Engine) -> None:
        disable_torch_dropout(engine.model)
        self._engine, self.capture = engine, ForwardCapture(engine)
        engine.observers += [self.capture, self]
        torch.set_default_dtype(torch.float64)  # tensors that a forward makes without naming a dtype
        self.start(engine, weight_shards(engine))

    def before_update(self) -> None:
        self._gradients = list(parameter_shards(self._engine, lambda param: param.grad))

    def on_step_end(self, engine: Engine, result: StepResult) -> None:
        limit = engine.config.train.clip_grad_norm
        factor = 1.0 if limit is None else min(1.0, limit / (result.grad_norm + 1e-6))
        gradients = [shard._replace(value=shard.value / factor) for shard in self._gradients]
        numbers = {"count": result.count, "loss": result.loss, "norm": result.grad_norm}
        self.step(engine, result.step, numbers, gradients, weight_shards(engine))

    def start(self, engine: Engine, weights: list[Shard]) -> None:
        """Handle the weights with which the run starts."""
        raise NotImplementedError

    def step(
        self, engine: Engine, step: int, numbers: dict[str, float], gradients: list[Shard], weights: list[Shard]
    ) -> None:
        """Handle the values of a step, besides those of ``capture``."""
        raise NotImplementedError


class Reference(Recorder):
    """The recorder of the run in one process.

    It writes ``step-N.pt``, where step 0 has the initial weights, and ``reference.json``. The batch of a step is one
    microbatch, unless layers mix its samples (batch norm): then it is cut as under the plan.
    """

    def __init__(self, folder: str) -> None:
        self._folder, self._order, self._samples = Path(folder), dict[str, None](), dict[int, list[str]]()

    def start(self, engine: Engine, weights: list[Shard]) -> None:
        if not model_parallel_of(engine.context).interleaves_microbatches:
            engine.pipeline.set_microbatches(1)
        for logical in logical_parameters(engine.model):
            if logical.parameter.requires_grad:
                logical.parameter.register_post_accumulate_grad_hook(
                    lambda done, name=logical.name: self._order.setdefault(name)
                )
        self._names = [shard.name for shard in weights]
        self._write(0, weights={shard.name: shard.value for shard in weights})

    def step(
        self, engine: Engine, step: int, numbers: dict[str, float], gradients: list[Shard], weights: list[Shard]
    ) -> None:
        self._samples[step], outputs = self.capture.take()
        by_name = {shard.name: shard.value for shard in gradients}
        order = [name for name in dict.fromkeys([*self._order, *by_name]) if name in by_name]
        self._order = {}
        self._write(
            step,
            samples=self._samples[step],
            outputs={output.title: next(iter(output.by_shape.items())) for output in outputs if output.by_shape},
            numbers=numbers,
            # in the order of backward: a wrong gradient of an activation spoils those that are computed after it
            gradients={name: by_name[name] for name in order},
            weights={shard.name: shard.value for shard in weights},
        )

    def on_train_end(self, engine: Engine) -> None:
        (self._folder / "reference.json").write_text(json.dumps({"names": self._names, "samples": self._samples}))

    def _write(self, step: int, **values: Any) -> None:
        torch.save(values, self._folder / f"step-{step}.pt")


class Comparison(Recorder):
    """The recorder of the run under the plan. It compares this rank's values with the reference, into ``rank-N.json``.

    Args:
        folder: the folder with the files of the run in one process.
        tolerance: the largest relative difference that is not described.
    """

    def __init__(self, folder: str, tolerance: float) -> None:
        self._folder, self._tolerance = Path(folder), tolerance
        self._findings: list[Finding] = []
        self._samples: dict[int, list[str]] = {}
        self._masks: dict[tuple[str, Any], Tensor] = {}
        self._num_left_out = 0

    def start(self, engine: Engine, weights: list[Shard]) -> None:
        self._compare("start", 0, weights, self._read(0)["weights"])

    def step(
        self, engine: Engine, step: int, numbers: dict[str, float], gradients: list[Shard], weights: list[Shard]
    ) -> None:
        expected = self._read(step)
        self._samples[step], outputs = self.capture.take()
        self._compare_outputs(step, outputs, expected)
        for kind, number in numbers.items():
            mine, other = (torch.tensor(float(value)) for value in (number, expected["numbers"][kind]))
            self._add(difference_of(mine, other, 0.0, Finding(kind, step)))
        missing = expected["gradients"].keys() - {shard.name for shard in gradients}
        without = [shard for shard in weights if shard.part and shard.name in missing]
        gradients += [shard._replace(value=torch.zeros_like(shard.value)) for shard in without]
        self._compare("gradient", step, gradients, expected["gradients"])
        self._exclude_noise(gradients, expected["gradients"])
        self._compare("weight", step, weights, expected["weights"])

    def on_train_end(self, engine: Engine) -> None:
        context = engine.context
        out = {
            "batch_shard": context.index(model_parallel_of(context).regions.whole.batch),
            "samples": self._samples,
            "left_out": self._num_left_out,
            "findings": [asdict(finding) for finding in self._findings],
        }
        (self._folder / f"rank-{context.rank}.json").write_text(json.dumps(out))

    def _read(self, step: int) -> dict[str, Any]:
        read: dict[str, Any] = torch.load(self._folder / f"step-{step}.pt", mmap=True)
        return read

    def _add(self, finding: Finding) -> None:
        self._findings.append(replace(finding, rank=self._engine.context.rank))

    # -- parameters, buffers, gradients ---------------------------------------------------------------------

    def _compare(self, kind: str, step: int, shards: list[Shard], expected: dict[str, Tensor]) -> None:
        """Compare each box with the same box of the run in one process."""
        scale = FLOOR * norm_of(value for value in expected.values() if value.is_floating_point())
        place = {name: number for number, name in enumerate(expected)}
        for shard in shards:
            other = expected.get(shard.name)
            shape = shard.part.shape if shard.part else tuple(shard.value.shape)
            at = Finding(kind, step, shard.name, place.get(shard.name, len(place)))
            if other is None and kind == "gradient":
                other = torch.zeros(shape, dtype=shard.value.dtype)
            if other is None:
                message = "the model has it under the plan, but not in one process: its constructor depends on the plan"
            elif tuple(other.shape) != tuple(shape):
                message = (
                    f"its full shape is {list(shape)} under the plan and {list(other.shape)} in one process: pass "
                    f"full sizes to layers, they take their shard themselves"
                )
            else:
                self._compare_box(shard, other, max(norm_of([other]), scale), at)
                continue
            self._add(replace(at, relative=math.inf, details=[message]))

    def _compare_box(self, shard: Shard, whole: Tensor, scale: float, at: Finding) -> None:
        other = whole[tuple(slice(*span) for span in shard.box)]
        mask = self._masks.get((shard.name, shard.box)) if at.kind == "weight" else None
        finding = difference_of(shard.value, other, scale, at, mask)
        if not finding.relative <= self._tolerance:
            index = [number + start for number, (start, _) in zip(finding.index, shard.box, strict=True)]
            finding = replace(finding, index=index, details=self._details(at.kind, shard.part))
        self._add(finding)

    def _details(self, kind: str, part: Part | None) -> list[str]:
        if part is None or not isinstance(part.memory, nn.Parameter):
            return []
        split = f"layout {part.layout}" if part.is_split else "whole on every rank"
        lines = [f"shape {list(part.shape)}, {split}"]
        if kind == "gradient":
            axes = " x ".join(gradient_sum_axes(part.memory, self._engine.context))
            lines.append(f"its gradient is summed over {axes}" if axes else "its gradient needs no sum over ranks")
        return lines

    def _exclude_noise(self, gradients: list[Shard], expected: dict[str, Tensor]) -> None:
        """Exclude weights from later comparisons whose gradient was noise, unless it was exactly zero in both runs.

        The optimizer of the config takes the steps, since it must not depend on the plan either. Where a true gradient
        is zero (a key bias of attention: softmax ignores it), both runs compute rounding noise, which Adam and the like
        turn into larger steps. Losses and later gradients stay comparable: the loss does not depend on such a weight.
        """
        count = sum(grad.numel() for grad in expected.values())
        common_limit = NOISE * norm_of(expected.values()) / math.sqrt(max(count, 1))
        for shard in gradients:
            whole = expected.get(shard.name)
            if whole is None or tuple(whole.shape) != tuple(shard.part.shape if shard.part else ()):
                continue
            limit = max(SMALL * norm_of([whole]) / math.sqrt(max(whole.numel(), 1)), common_limit)
            other, key = whole[tuple(slice(*span) for span in shard.box)], (shard.name, shard.box)
            clear = (other.abs() >= limit) | ((other == 0) & (shard.value == 0))
            self._masks[key] = self._masks[key] & clear if key in self._masks else clear
        self._num_left_out = sum(int((~mask).sum()) for mask in self._masks.values())

    # -- outputs --------------------------------------------------------------------------------------------

    def _compare_outputs(self, step: int, outputs: Iterable[Output], expected: dict[str, Any]) -> None:
        """Compare each module's output, sample by sample."""
        row_of = {key: row for row, key in enumerate(expected["samples"])}
        rows = [row_of.get(key, -1) for key in self._samples[step]]
        if -1 in rows:
            return  # the data differs, which `verify_report` reports
        place = {title: number for number, title in enumerate(expected["outputs"])}
        for output in outputs:
            if output.title in place:
                shape, reference = expected["outputs"][output.title]
                at = Finding("output", step, output.title, place[output.title], stage=output.stage)
                if shape in output.by_shape:
                    finding = difference_of_rows(output.by_shape[shape], reference[rows], self._tolerance, at)
                    finding = replace(finding, sample=rows[finding.sample or 0])
                else:
                    mine = " or ".join(str(list(own)) for own in output.by_shape)
                    message = f"shape {mine or 'varying'} for each sample, in one process {list(shape)}"
                    finding = replace(at, relative=math.inf, details=[message])
                if not finding.relative <= self._tolerance:
                    name = self.capture.classes[output.title.partition(",")[0]]
                    finding = replace(finding, details=[f"class {name}", *finding.details])
                self._add(finding)


# -- how far tensors of the two runs are apart ------------------------------------------------------------


def difference_of(
    plan: Tensor, reference: Tensor, scale: float, at: Finding, comparable: Tensor | None = None
) -> Finding:
    """Compare tensors of one shape in float64, on the scale max(norm of ``reference``, ``scale``).

    Args:
        at: the place of the comparison.
        comparable: mask of the elements that count, of the same shape; None: all do.
    """
    plan, reference = plan.double(), reference.double()
    difference = (plan - reference).abs()
    if comparable is not None:
        difference = difference.masked_fill(~comparable, 0.0)
    if not difference.numel():
        return at
    # equal infinities and two NaN in one place are no difference
    same = (plan == reference) | (plan.isnan() & reference.isnan())
    difference = difference.masked_fill(same, 0.0).nan_to_num(nan=math.inf, posinf=math.inf)
    distance, scale = torch.linalg.vector_norm(difference).item(), max(norm_of([reference]), scale)
    index = torch.unravel_index(difference.argmax(), difference.shape)
    return replace(
        at,
        relative=distance / scale if scale else (math.inf if distance else 0.0),
        absolute=difference[index].item(),
        index=[int(number) for number in index],
        plan=plan[index].item(),
        reference=reference[index].item(),
    )


def difference_of_rows(plan: Tensor, reference: Tensor, tolerance: float, at: Finding) -> Finding:
    """Compare two `row_fingerprints`.

    Return the first row beyond the tolerance, else the one with the largest difference. The scale of a row is its own
    norm, but at least `FLOOR` times the largest row's.
    """
    difference = (plan - reference).abs().nan_to_num(nan=math.inf).amax(1)
    norms = reference[:, 0]
    relative = torch.where(difference == 0, 0.0, difference / norms.clamp(min=FLOOR * norms.max().item()))
    is_beyond = ~(relative <= tolerance)
    row = int((is_beyond.int() if is_beyond.any() else relative).argmax())
    return replace(
        at,
        relative=relative[row].item(),
        absolute=difference[row].item(),
        sample=row,
        plan=plan[row, 0].item(),
        reference=reference[row, 0].item(),
    )
