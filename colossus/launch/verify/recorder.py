"""The hook that both runs carry: it makes the model comparable and writes down what it does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from colossus.engine.engine import Engine
from colossus.engine.gradient_sync import gradient_sum_axes
from colossus.engine.hooks import Hook
from colossus.engine.results import StepResult
from colossus.launch.verify.prints import whole_print
from colossus.launch.verify.quiet import Silence
from colossus.launch.verify.records import ParameterFacts, RankFacts, Records
from colossus.launch.verify.watch import ForwardWatch
from colossus.layers.layer import plan_of
from colossus.layers.state import full_state_dict
from colossus.layout.parameter import logical_parameters, spec_of


class Recorder(Hook):
    """Turns dropout off, and records every step of the run.

    Gradients are taken before the optimizer sees them, and divided by the factor of clipping: that factor is a
    function of the global norm, so that one wrong gradient would otherwise change all of them.

    Args:
        folder: where to write; the same on all ranks.
    """

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)
        self._gradients: dict[str, Tensor] = {}
        self._order: dict[str, None] = {}

    def on_train_start(self, engine: Engine) -> None:
        context, model = engine.context, engine.model
        self.records = Records(self.folder, context.world_size)
        self._silence = Silence(model)
        self._watch = ForwardWatch(model)
        torch.set_default_dtype(torch.float64)  # what a forward makes without naming a dtype
        loss_fn = engine.loss_fn

        def watched_loss(outputs: Any, part: Any) -> Any:
            self._watch.end_microbatch(part)
            return loss_fn(outputs, part)

        engine.loss_fn = watched_loss
        self._note_order(model)
        engine.optimizer.register_step_pre_hook(lambda *_: self._take_gradients(engine))
        self._write_weights(engine, 0)

    def _note_order(self, model: nn.Module) -> None:
        names: dict[nn.Parameter, list[str]] = {}
        for logical in logical_parameters(model):
            names.setdefault(logical.parameter, []).append(logical.name)
        for parameter in names:
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(
                    lambda done: self._order.update(dict.fromkeys(names[done]))
                )

    def _take_gradients(self, engine: Engine) -> None:
        self._gradients = full_state_dict(engine.model, engine.context, gradients=True)

    def on_step_end(self, engine: Engine, result: StepResult) -> None:
        context, step = engine.context, self._watch.take()
        step.loss, step.tokens, step.grad_norm = result.loss, result.tokens, result.grad_norm
        step.order, self._order = list(self._order), {}
        limit = engine.config.train.clip_grad_norm
        factor = 1.0 if limit is None else min(1.0, limit / (result.grad_norm + 1e-6))
        gradients, self._gradients = {name: grad / factor for name, grad in self._gradients.items()}, {}
        step.gradients = {name: whole_print(grad) for name, grad in gradients.items()}
        if context.rank == 0:
            self.records.write(gradients, "gradients", step=result.step)
        step.weights = self._write_weights(engine, result.step)
        self.records.write(step, "step", context.rank, result.step)

    def on_train_end(self, engine: Engine) -> None:
        context = engine.context
        batch = plan_of(context).regions.user.batch
        part = (context.index(batch), context.size(batch))
        self.records.write(RankFacts(part, self._watch.modules, self._notes(engine)), "facts", context.rank)
        if context.rank == 0:
            self.records.write(_parameter_facts(engine), "parameters")

    def _write_weights(self, engine: Engine, step: int) -> dict[str, Tensor]:
        """Write the whole state (on rank 0), and return its prints."""
        weights = full_state_dict(engine.model, engine.context)
        if engine.context.rank == 0:
            self.records.write(weights, "weights", step=step)
        prints = {name: whole_print(value) for name, value in weights.items()}
        if step == 0:
            self.records.write(prints, "start", engine.context.rank)
        return prints

    def _notes(self, engine: Engine) -> tuple[str, ...]:
        silent, notes = [*self._silence.modules, *sorted(self._silence.calls)], []
        if silent:
            notes.append(f"dropout is off here, its masks differ between plans by design: {_some(silent)}")
        norms = [
            name or type(module).__name__
            for name, module in engine.model.named_modules()
            if isinstance(module, _BatchNorm) and not isinstance(module, nn.SyncBatchNorm) and module.training
        ]
        if norms:
            notes.append(
                f"BatchNorm takes its statistics over the samples that a rank holds at once, so {_some(norms)} and all "
                f"that follows depend on the plan"
            )
        return tuple(notes)


def _parameter_facts(engine: Engine) -> dict[str, ParameterFacts]:
    facts = {}
    for logical in logical_parameters(engine.model):
        spec = spec_of(logical.parameter)
        origin = spec.description.partition(" ")[0] if spec is not None else "plain parameter"
        axes = gradient_sum_axes(logical.parameter, engine.context)
        facts[logical.name] = ParameterFacts(logical.shape, logical.layout, axes, origin)
    return facts


def _some(names: list[str], most: int = 3) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
