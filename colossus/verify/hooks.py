"""The hooks of the two runs: in one process what each step computes is written, under the plan it is compared with."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from colossus.engine.engine import Engine
from colossus.engine.fit import Hook
from colossus.engine.results import StepResult
from colossus.gradients.buckets import gradient_sum_axes
from colossus.layers.model_parallel import model_parallel_of
from colossus.layout.parameter import LogicalParameter, logical_parameters
from colossus.schedule.executor import StepObserver
from colossus.verify.capture import ForwardCapture, Held, Output, disable_torch_dropout, held_parameters, held_weights
from colossus.verify.verify_report import Finding

FLOOR = 1e-3
"""What is small against all of its kind is compared on the scale of this fraction of their common norm."""

SMALL, NOISE = 1e-6, 1e-9
"""An element of a gradient below `SMALL` of its parameter's root mean square, or below `NOISE` of that of all
gradients, may be rounding for the most part."""


class Recorder(Hook, StepObserver):
    """Turns torch's own dropout off, and sees every step of a run.

    Gradients are taken before the optimizer sees them, and divided by the factor of clipping: that factor is a
    function of the global norm, so that one wrong gradient would otherwise change all of them.
    """

    def on_train_start(self, engine: Engine) -> None:
        disable_torch_dropout(engine.model)
        self._engine, self.capture = engine, ForwardCapture(engine)
        engine.observers += [self.capture, self]
        torch.set_default_dtype(torch.float64)  # what a forward makes without naming a dtype
        self.start(engine, held_weights(engine))

    def before_update(self) -> None:
        self._gradients = list(held_parameters(self._engine, lambda param: param.grad))

    def on_step_end(self, engine: Engine, result: StepResult) -> None:
        limit = engine.config.train.clip_grad_norm
        factor = 1.0 if limit is None else min(1.0, limit / (result.grad_norm + 1e-6))
        gradients = [each._replace(value=each.value / factor) for each in self._gradients]
        numbers = {"count": result.count, "loss": result.loss, "norm": result.grad_norm}
        self.step(engine, result.step, numbers, gradients, held_weights(engine))

    def start(self, engine: Engine, weights: list[Held]) -> None:
        """What the run starts from."""
        raise NotImplementedError

    def step(
        self, engine: Engine, step: int, numbers: dict[str, float], gradients: list[Held], weights: list[Held]
    ) -> None:
        """What a step has computed, besides what ``capture`` has seen."""
        raise NotImplementedError


class Reference(Recorder):
    """In one process: writes ``step-N.pt``, where step 0 is what the run starts from, and ``samples.json``.

    The batch of a step is one microbatch, unless layers mix its samples (batch norm): then it is cut as under the plan.
    """

    def __init__(self, folder: str) -> None:
        self._folder, self._order, self._samples = Path(folder), dict[str, None](), dict[int, list[str]]()

    def start(self, engine: Engine, weights: list[Held]) -> None:
        if not model_parallel_of(engine.context).interleaves_microbatches:
            engine.pipeline.set_microbatches(1)
        for logical in logical_parameters(engine.model):
            if logical.parameter.requires_grad:
                logical.parameter.register_post_accumulate_grad_hook(
                    lambda done, name=logical.name: self._order.setdefault(name)
                )
        self._names = [each.name for each in weights]
        self._write(0, weights={each.name: each.value for each in weights})

    def step(
        self, engine: Engine, step: int, numbers: dict[str, float], gradients: list[Held], weights: list[Held]
    ) -> None:
        self._samples[step], outputs = self.capture.take()
        by_name = {each.name: each.value for each in gradients}
        order = [name for name in dict.fromkeys([*self._order, *by_name]) if name in by_name]
        self._order = {}
        self._write(
            step,
            samples=self._samples[step],
            outputs={each.title: next(iter(each.by_shape.items())) for each in outputs if each.by_shape},
            numbers=numbers,
            # in the order of backward: a wrong gradient of an activation spoils those that are computed after it
            gradients={name: by_name[name] for name in order},
            weights={each.name: each.value for each in weights},
        )

    def on_train_end(self, engine: Engine) -> None:
        (self._folder / "reference.json").write_text(json.dumps({"names": self._names, "samples": self._samples}))

    def _write(self, step: int, **values: Any) -> None:
        torch.save(values, self._folder / f"step-{step}.pt")


class Comparison(Recorder):
    """Under the plan: compares what this rank has with what one process has written, and writes ``rank-N.json``.

    Args:
        folder: where the run in one process has written.
        tolerance: a difference beyond it is described.
    """

    def __init__(self, folder: str, tolerance: float) -> None:
        self._folder, self._tolerance = Path(folder), tolerance
        self._findings: list[Finding] = []
        self._samples: dict[int, list[str]] = {}
        self._masks: dict[tuple[str, Any], Tensor] = {}
        self._num_left_out = 0

    def start(self, engine: Engine, weights: list[Held]) -> None:
        self._compare("start", 0, weights, self._read(0)["weights"])

    def step(
        self, engine: Engine, step: int, numbers: dict[str, float], gradients: list[Held], weights: list[Held]
    ) -> None:
        expected = self._read(step)
        self._samples[step], outputs = self.capture.take()
        self._compare_outputs(step, outputs, expected)
        for kind, number in numbers.items():
            mine, other = (torch.tensor(float(each)) for each in (number, expected["numbers"][kind]))
            self._add(difference_of(mine, other, 0.0, Finding(kind, step)))
        known = {each.name for each in gradients}
        none = [each for each in weights if each.logical and each.name in expected["gradients"].keys() - known]
        gradients += [each._replace(value=torch.zeros_like(each.value)) for each in none]
        self._compare("gradient", step, gradients, expected["gradients"])
        self._exclude_noise(gradients, expected["gradients"])
        self._compare("weight", step, weights, expected["weights"])

    def on_train_end(self, engine: Engine) -> None:
        context = engine.context
        out = {
            "batch_shard": context.index(model_parallel_of(context).regions.whole.batch),
            "samples": self._samples,
            "left_out": self._num_left_out,
            "findings": [asdict(each) for each in self._findings],
        }
        (self._folder / f"rank-{context.rank}.json").write_text(json.dumps(out))

    def _read(self, step: int) -> dict[str, Any]:
        read: dict[str, Any] = torch.load(self._folder / f"step-{step}.pt", mmap=True)
        return read

    def _add(self, finding: Finding) -> None:
        self._findings.append(replace(finding, rank=self._engine.context.rank))

    # -- parameters, buffers, gradients ---------------------------------------------------------------------

    def _compare(self, kind: str, step: int, held: list[Held], expected: dict[str, Tensor]) -> None:
        """Each box with the same box of one process."""
        scale = FLOOR * norm_of(value for value in expected.values() if value.is_floating_point())
        place = {name: number for number, name in enumerate(expected)}
        for each in held:
            other = expected.get(each.name)
            shape = each.logical.shape if each.logical else tuple(each.value.shape)
            at = Finding(kind, step, each.name, place.get(each.name, len(place)))
            if other is None and kind == "gradient":
                other = torch.zeros(shape, dtype=each.value.dtype)
            if other is None:
                message = "the model has it under the plan, but not in one process: its constructor depends on the plan"
            elif tuple(other.shape) != tuple(shape):
                message = (
                    f"its full shape is {list(shape)} under the plan and {list(other.shape)} in one process: give "
                    f"layers full sizes, they take their shard themselves"
                )
            else:
                self._compare_box(each, other, max(norm_of([other]), scale), at)
                continue
            self._add(replace(at, relative=math.inf, details=[message]))

    def _compare_box(self, held: Held, whole: Tensor, scale: float, at: Finding) -> None:
        other = whole[tuple(slice(*span) for span in held.box)]
        mask = self._masks.get((held.name, held.box)) if at.kind == "weight" else None
        found = difference_of(held.value, other, scale, at, mask)
        if not found.relative <= self._tolerance:
            index = [number + start for number, (start, _) in zip(found.index, held.box, strict=True)]
            found = replace(found, index=index, details=self._details(at.kind, held.logical))
        self._add(found)

    def _details(self, kind: str, logical: LogicalParameter | None) -> list[str]:
        if logical is None:
            return []
        split = f"layout {logical.layout}" if logical.layout.shard_axes else "whole on every rank"
        lines = [f"shape {list(logical.shape)}, {split}"]
        if kind == "gradient":
            axes = " x ".join(gradient_sum_axes(logical.parameter, self._engine.context))
            lines.append(f"its gradient is summed over {axes}" if axes else "its gradient needs no sum over ranks")
        return lines

    def _exclude_noise(self, gradients: list[Held], expected: dict[str, Tensor]) -> None:
        """Leave weights out of the comparison from here on whose gradient was noise, unless exactly zero in both runs.

        The optimizer of the config takes the steps, since it must not depend on the plan either. Where a true gradient
        is zero (a key bias of attention: softmax ignores it) both runs hold rounding noise, which Adam and the like
        turn into larger steps. Losses and later gradients stay comparable: the loss does not depend on such a weight.
        """
        count = sum(grad.numel() for grad in expected.values())
        of_all = NOISE * norm_of(expected.values()) / math.sqrt(max(count, 1))
        for each in gradients:
            whole = expected.get(each.name)
            if whole is None or tuple(whole.shape) != tuple(each.logical.shape if each.logical else ()):
                continue
            limit = max(SMALL * norm_of([whole]) / math.sqrt(max(whole.numel(), 1)), of_all)
            other, key = whole[tuple(slice(*span) for span in each.box)], (each.name, each.box)
            clear = (other.abs() >= limit) | ((other == 0) & (each.value == 0))
            self._masks[key] = self._masks[key] & clear if key in self._masks else clear
        self._num_left_out = sum(int((~mask).sum()) for mask in self._masks.values())

    # -- outputs --------------------------------------------------------------------------------------------

    def _compare_outputs(self, step: int, outputs: Iterable[Output], expected: dict[str, Any]) -> None:
        """Each module's output, sample by sample."""
        row_of = {key: row for row, key in enumerate(expected["samples"])}
        rows = [row_of.get(key, -1) for key in self._samples[step]]
        if -1 in rows:
            return  # other data
        place = {title: number for number, title in enumerate(expected["outputs"])}
        for each in outputs:
            if each.title in place:
                shape, reference = expected["outputs"][each.title]
                at = Finding("output", step, each.title, place[each.title], stage=each.stage)
                if shape in each.by_shape:
                    found = difference_of_rows(each.by_shape[shape], reference[rows], self._tolerance, at)
                    found = replace(found, sample=rows[found.sample or 0])
                else:
                    mine = " or ".join(str(list(own)) for own in each.by_shape)
                    message = f"shape {mine or 'varying'} for each sample, in one process {list(shape)}"
                    found = replace(at, relative=math.inf, details=[message])
                if not found.relative <= self._tolerance:
                    name = self.capture.classes[each.title.partition(",")[0]]
                    found = replace(found, details=[f"class {name}", *found.details])
                self._add(found)


# -- how far tensors of the two runs are apart ------------------------------------------------------------


def difference_of(
    plan: Tensor, reference: Tensor, scale: float, at: Finding, comparable: Tensor | None = None
) -> Finding:
    """Compare tensors of one shape in float64, on the scale max(norm of ``reference``, ``scale``).

    Args:
        at: what is compared.
        comparable: mask of the elements that count, of the same shape; by default all do.
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
    """Compare two `row_fingerprints`: the first row beyond the tolerance, else the one that is farthest off.

    A row is compared on the scale of its own norm, but at least of `FLOOR` times the largest row's.
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


def norm_of(tensors: Iterable[Tensor]) -> float:
    """Common norm of the finite elements."""
    return math.sqrt(sum(each.double().nan_to_num(0.0, 0.0, 0.0).square().sum().item() for each in tensors))
