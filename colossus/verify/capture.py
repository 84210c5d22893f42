"""The hook that both runs carry: it turns dropout off, and writes down what the forwards and steps compute."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from colossus.checkpoint.state_dict import full_state_dict
from colossus.engine.engine import Engine
from colossus.engine.hooks import Hook
from colossus.engine.results import StepResult
from colossus.gradients.axes import gradient_sum_axes
from colossus.layers.layer import Layer
from colossus.layers.model_parallel import model_parallel_of
from colossus.layout.parameter import logical_parameters, spec_of
from colossus.layout.redistribute import gather
from colossus.nest import tensors
from colossus.schedule.runtime.observer import StepObserver
from colossus.sharded_tensor.regions import local, to_whole
from colossus.verify.disable_dropout import DisabledDropout
from colossus.verify.records import (
    Call,
    Output,
    ParameterInfo,
    RankInfo,
    RankStep,
    Records,
    fingerprint,
    row_fingerprints,
    sample_keys,
    token_fingerprints,
)
from colossus.verify.tokens import TokenPlaces


class Recorder(Hook):
    """Turns dropout off, and records every step of the run.

    Gradients are taken before the optimizer sees them, and divided by the factor of clipping: that factor is a
    function of the global norm, so that one wrong gradient would otherwise change all of them.

    Args:
        folder: where to write; the same on all ranks.
        by_token: outputs are compared token by token, since under the plan no rank has all tokens of a sequence.
    """

    def __init__(self, folder: str, by_token: bool = False) -> None:
        self.folder, self.by_token = Path(folder), by_token
        self._gradients: dict[str, Tensor] = {}
        self._fingerprints: dict[str, Tensor] = {}
        self._order: dict[str, None] = {}

    def on_train_start(self, engine: Engine) -> None:
        context, model = engine.context, engine.model
        self.records = Records(self.folder, context.world_size)
        self._dropout = DisabledDropout(model)
        places = TokenPlaces(context) if self.by_token else None
        self._capture = ForwardCapture(model, engine.pipeline.last_stage, places)
        engine.observers += [self._capture, _BeforeUpdate(lambda: self._capture_gradients(engine))]
        torch.set_default_dtype(torch.float64)  # what a forward makes without naming a dtype
        self._record_order(model)
        self._write_weights(engine, 0)

    def _record_order(self, model: nn.Module) -> None:
        names: dict[nn.Parameter, list[str]] = {}
        for logical in logical_parameters(model):
            names.setdefault(logical.parameter, []).append(logical.name)
        for parameter in names:
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(
                    lambda done: self._order.update(dict.fromkeys(names[done]))
                )

    def _capture_gradients(self, engine: Engine) -> None:
        self._gradients = full_state_dict(engine.model, engine.context, gradients=True)
        self._fingerprints = _own_fingerprints(engine, self._gradients, gradients=True)

    def on_step_end(self, engine: Engine, result: StepResult) -> None:
        context, step = engine.context, self._capture.take()
        step.loss, step.tokens, step.grad_norm = result.loss, result.tokens, result.grad_norm
        step.order, self._order = list(self._order), {}
        limit = engine.config.train.clip_grad_norm
        factor = 1.0 if limit is None else min(1.0, limit / (result.grad_norm + 1e-6))
        step.gradients = {name: held / factor for name, held in self._fingerprints.items()}
        if context.rank == 0:
            gradients = {name: grad / factor for name, grad in self._gradients.items()}
            self.records.write(gradients, "gradients", step=result.step)
        self._gradients = {}
        step.weights = self._write_weights(engine, result.step)
        self.records.write(step, "step", context.rank, result.step)

    def on_train_end(self, engine: Engine) -> None:
        context = engine.context
        norms = [
            name or type(module).__name__
            for name, module in engine.model.named_modules()
            if isinstance(module, _BatchNorm) and not isinstance(module, nn.SyncBatchNorm) and module.training
        ]
        info = RankInfo(
            batch_shard=context.index(model_parallel_of(context).regions.whole.batch),
            modules=self._capture.modules,
            rank_of=dict(engine.pipeline.rank_of),
            without_dropout=(*self._dropout.modules, *sorted(self._dropout.calls)),
            batch_norms=tuple(norms),
            parameters=_parameter_info(engine),
        )
        self.records.write(info, "info", context.rank)

    def _write_weights(self, engine: Engine, step: int) -> dict[str, Tensor]:
        """Write the full state (on rank 0), and return the fingerprints of what this rank holds of it."""
        weights = full_state_dict(engine.model, engine.context, aliases=False)
        if engine.context.rank == 0:
            self.records.write(weights, "weights", step=step)
        fingerprints = _own_fingerprints(engine, weights)
        if step == 0:
            self.records.write(fingerprints, "start", engine.context.rank)
        return fingerprints


def _own_fingerprints(engine: Engine, full: dict[str, Tensor], *, gradients: bool = False) -> dict[str, Tensor]:
    """Fingerprints of the full tensors of which this rank holds a shard.

    ``full`` takes a parameter that stages share from the first of them; here it is gathered from this rank's stage.
    """
    context, model = engine.context, engine.model
    shared = {id(parameter) for parameter, _ in engine.pipeline.tied_parameters(model)}
    fingerprints = {}
    for logical in logical_parameters(model):
        held = logical.parameter.grad if gradients else logical.parameter.data
        if held is None:
            continue
        value = full[logical.name]
        if id(logical.parameter) in shared:
            value = gather(logical.local(held), logical.layout, logical.shape, context)
        fingerprints[logical.name] = fingerprint(value)
    if not gradients:
        fingerprints |= {name: fingerprint(buffer) for name, buffer in model.named_buffers() if name in full}
    return fingerprints


def _parameter_info(engine: Engine) -> dict[str, ParameterInfo]:
    info, partition = {}, engine.pipeline.partition
    for logical in logical_parameters(engine.model):
        spec = spec_of(logical.parameter)
        origin = "plain parameter" if spec.is_plain else spec.description.partition(" ")[0]
        axes = gradient_sum_axes(logical.parameter, engine.context)
        held = ParameterInfo(logical.shape, logical.layout, axes, origin)
        if partition is not None:
            name = logical.parameter_name
            held = replace(held, stages=partition.stages_of[name], pipeline_ranks=partition.ranks_of(name))
        info[logical.name] = held
    return info


MODEL = "the model"
"""Name of the output of the full model."""


class _BeforeUpdate(StepObserver):
    def __init__(self, call: Callable[[], None]) -> None:
        self.before_update = call  # type: ignore[method-assign]


class ForwardCapture(StepObserver):
    """Fingerprints the outputs of every module whose output is in the whole layout, or can be moved to it.

    It observes the stages: a pipeline does not call the model itself, so the model's output is what the last stage
    returns. Modules inside of one of our layers compute on shards, in layouts that only the layer knows, and are
    skipped. Activation checkpointing runs a module again in backward, where it must call the same collectives:
    fingerprints are taken there, too, and dropped when the next forward begins, like those of modules that the loss
    function calls.

    Args:
        last: number of the last stage.
        places: where this rank's tokens are; None when outputs are compared sample by sample.
    """

    compares_batches = needs_samples = True

    def __init__(self, model: nn.Module, last: int, places: TokenPlaces | None = None) -> None:
        self.modules = {name or MODEL: type(module).__name__ for name, module in visible_modules(model)}
        self._last, self._stage, self._places = last, 0, places
        self._positions: list[int] = []
        self._num_positions = 0
        #: of a model that adds tokens of its own to make them divide
        self._without_padding = getattr(model, "without_padding", lambda x: x)
        self._counts: Counter[str] = Counter()
        self._forward: dict[Call, Output] = {}
        self._outputs: dict[Call, dict[int, Output]] = {}
        self._calls: dict[tuple[int, str], int] = {}
        self._leaves: list[str] = []
        self._samples: dict[int, list[tuple[str, ...]]] = {}
        for name, module in visible_modules(model):
            if name:
                module.register_forward_hook(self._hook(name))

    def before_forward(self, stage: int, microbatch: int, samples: Any) -> None:
        if microbatch not in self._samples:  # before the model can write to them
            _, self._leaves, self._samples[microbatch] = sample_keys(samples)
        if self._places is not None:
            self._num_positions, self._positions = self._places.of(samples)
        self._stage = stage
        self._counts.clear()
        self._forward = {}

    def after_forward(self, stage: int, microbatch: int, output: Any) -> None:
        """Keep the outputs whose dim 0 is the samples of this rank's shard of the microbatch."""
        if stage == self._last:
            self._record(MODEL, output)
        rows = len(self._samples[microbatch])
        for call, held in self._forward.items():
            if held.rows.shape[0] == rows:
                self._outputs.setdefault(call, {})[microbatch] = held
        for name, count in self._counts.items():
            self._calls[stage, name] = max(count, self._calls.get((stage, name), 0))
        self._forward = {}

    def _hook(self, name: str) -> Any:
        return lambda module, args, output: self._record(name, output)

    @torch.no_grad()
    def _record(self, name: str, output: Any) -> None:
        self._counts[name] += 1
        for path, tensor in tensors(output):
            value = self._without_padding(local(to_whole(tensor.detach())))
            if value.dim():
                call = Call(self._stage, name, self._counts[name], path)
                tokens = token_fingerprints(value, len(self._positions)) if self._positions else {}
                self._forward[call] = Output(tuple(value.shape[1:]), row_fingerprints(value), tokens)

    def take(self) -> RankStep:
        """What was captured since the last call: the outputs that every microbatch has, in one shape."""
        order = sorted(self._samples)
        outputs = {}
        for call, held in self._outputs.items():
            shapes = {output.shape for output in held.values()}
            if len(held) == len(order) and len(shapes) == 1:
                parts = [held[microbatch] for microbatch in order]
                by_token = {dim: torch.cat([part.by_token[dim] for part in parts]) for dim in parts[0].by_token}
                outputs[call] = Output(shapes.pop(), torch.cat([part.rows for part in parts]), by_token)
        samples = [key for microbatch in order for key in self._samples[microbatch]]
        captured = RankStep(leaves=self._leaves, samples=samples, outputs=outputs, calls=self._calls)
        captured.positions, captured.num_positions = self._positions, self._num_positions
        self._outputs, self._samples, self._calls = {}, {}, {}
        return captured


def visible_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """All modules by name, without those inside of our layers."""
    seen: set[int] = set()

    def walk(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
        if id(module) in seen:
            return
        seen.add(id(module))
        yield name, module
        if not isinstance(module, Layer):
            for leaf, child in module.named_children():
                yield from walk(child, f"{name}.{leaf}" if name else leaf)

    return walk(model, "")
