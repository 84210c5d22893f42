"""The hook that both runs carry: it makes the model comparable and writes down what it does."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from colossus.checkpoint.state_dict import full_state_dict
from colossus.engine.engine import Engine
from colossus.engine.gradients.axes import gradient_sum_axes
from colossus.engine.hooks import Hook
from colossus.engine.results import StepResult
from colossus.layers.layer import model_parallel_of
from colossus.layout.parameter import logical_parameters, spec_of
from colossus.layout.redistribute import gather
from colossus.verify.capture import ForwardWatch
from colossus.verify.disable_dropout import Silence
from colossus.verify.fingerprints import whole_print
from colossus.verify.records import ParameterFacts, RankFacts, Records


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
        self._prints: dict[str, Tensor] = {}
        self._order: dict[str, None] = {}

    def on_train_start(self, engine: Engine) -> None:
        context, model = engine.context, engine.model
        self.records = Records(self.folder, context.world_size)
        self._silence = Silence(model)
        self._watch = ForwardWatch(model, engine.pipeline.last_stage)
        engine.stages.observers.append(self._watch)
        torch.set_default_dtype(torch.float64)  # what a forward makes without naming a dtype
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
        self._prints = _own_prints(engine, self._gradients, gradients=True)

    def on_step_end(self, engine: Engine, result: StepResult) -> None:
        context, step = engine.context, self._watch.take()
        step.loss, step.tokens, step.grad_norm = result.loss, result.tokens, result.grad_norm
        step.order, self._order = list(self._order), {}
        limit = engine.config.train.clip_grad_norm
        factor = 1.0 if limit is None else min(1.0, limit / (result.grad_norm + 1e-6))
        step.gradients = {name: print_ / factor for name, print_ in self._prints.items()}
        if context.rank == 0:
            gradients = {name: grad / factor for name, grad in self._gradients.items()}
            self.records.write(gradients, "gradients", step=result.step)
        self._gradients = {}
        step.weights = self._write_weights(engine, result.step)
        self.records.write(step, "step", context.rank, result.step)

    def on_train_end(self, engine: Engine) -> None:
        context = engine.context
        batch = model_parallel_of(context).regions.user.batch
        norms = [
            name or type(module).__name__
            for name, module in engine.model.named_modules()
            if isinstance(module, _BatchNorm) and not isinstance(module, nn.SyncBatchNorm) and module.training
        ]
        facts = RankFacts(
            batch_part=(context.index(batch), context.size(batch)),
            modules=self._watch.modules,
            rank_of=dict(engine.pipeline.rank_of),
            silenced=(*self._silence.modules, *sorted(self._silence.calls)),
            batch_norms=tuple(norms),
            parameters=_parameter_facts(engine),
        )
        self.records.write(facts, "facts", context.rank)

    def _write_weights(self, engine: Engine, step: int) -> dict[str, Tensor]:
        """Write the whole state (on rank 0), and return the prints of what this rank holds of it."""
        weights = full_state_dict(engine.model, engine.context)
        if engine.context.rank == 0:
            self.records.write(weights, "weights", step=step)
        prints = _own_prints(engine, weights)
        if step == 0:
            self.records.write(prints, "start", engine.context.rank)
        return prints


def _own_prints(engine: Engine, whole: dict[str, Tensor], *, gradients: bool = False) -> dict[str, Tensor]:
    """Prints of what this rank holds; ``whole`` has what stages share from the first of them, not from this one."""
    context, model = engine.context, engine.model
    shared = {id(parameter) for parameter, _ in engine.pipeline.tied_parameters(model)}
    prints = {}
    for logical in logical_parameters(model):
        held = logical.parameter.grad if gradients else logical.parameter.data
        if held is None:
            continue
        value = whole[logical.name]
        if id(logical.parameter) in shared:
            value = gather(logical.local(held), logical.layout, logical.shape, context)
        prints[logical.name] = whole_print(value)
    if not gradients:
        prints |= {name: whole_print(buffer) for name, buffer in model.named_buffers() if name in whole}
    return prints


def _parameter_facts(engine: Engine) -> dict[str, ParameterFacts]:
    facts, partition = {}, engine.pipeline.partition
    for logical in logical_parameters(engine.model):
        spec = spec_of(logical.parameter)
        origin = spec.description.partition(" ")[0] if spec is not None else "plain parameter"
        axes = gradient_sum_axes(logical.parameter, engine.context)
        held = ParameterFacts(logical.shape, logical.layout, axes, origin)
        if partition is not None:
            name = logical.held_as
            held = replace(held, stages=partition.stages_of[name], pipeline_ranks=partition.ranks_of(name))
        facts[logical.name] = held
    return facts
