"""The values that one rank computes: outputs of modules in each forward, parameters, buffers and their gradients."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from colossus.checkpoint.part import Part
from colossus.comm import collectives
from colossus.data.model_input import sequence_length
from colossus.engine.engine import Engine
from colossus.layers.layer import Layer
from colossus.layers.model_parallel import model_parallel_of
from colossus.layout.layout import Box
from colossus.layout.split_parameter import as_shards
from colossus.nest import tensors
from colossus.schedule.executor import StepObserver
from colossus.sharded_tensor.regions import local, to_whole
from colossus.state.model_parts import buffer_parts, parameter_parts
from colossus.verify.fingerprints import row_fingerprints, sample_keys

#: the name of the output of the full model
MODEL = "the model"


class Shard(NamedTuple):
    """This rank's box of a parameter, of its gradient, or of a buffer.

    Attributes:
        name: the logical name in the full model.
        box: (start, stop) of every dim of the full shape.
        value: a tensor of the size of the box, on the CPU.
        part: this rank's part of the parameter; None for a buffer.
    """

    name: str
    box: Box
    value: Tensor
    part: Part | None = None


def weight_shards(engine: Engine) -> list[Shard]:
    """Return this rank's boxes of all parameters, and its buffers."""
    shards = list(parameter_shards(engine, lambda param: param.data))
    shards += [Shard(part.key, part.box, part.local.cpu().clone()) for part in buffer_parts(engine.model)]
    return shards


def parameter_shards(engine: Engine, tensor_of: Callable[[Tensor], Tensor | None]) -> Iterator[Shard]:
    """Yield this rank's boxes of parameters, or of their gradients where there are some."""
    for part in parameter_parts(engine.model, engine.context):
        with as_shards():
            stored = tensor_of(part.memory)
            if stored is None:
                continue
            value = part.at(part.key, stored.to_dense() if stored.is_sparse else stored).local
            shard = Shard(part.key, part.box, value.cpu().clone(), part)
        yield shard


# -- outputs ----------------------------------------------------------------------------------------------


class Output(NamedTuple):
    """The output of one call of a module, for all samples of this rank in a step.

    Attributes:
        title: the call, as ``block, call 2, output[0]``.
        stage: the pipeline stage that made the call.
        by_shape: shape of one sample -> `row_fingerprints` of the samples. Where ranks split sequences, a dim that may
            be tokens also has an entry with the tokens of all ranks.
    """

    title: str
    stage: int
    by_shape: dict[tuple[int, ...], Tensor]


class ForwardCapture(StepObserver):
    """An observer that fingerprints the outputs of all modules whose output is whole, or can be moved to that layout.

    It observes the stages: a pipeline does not call the model itself, so the output of the last stage is the model's.
    Modules inside one of our layers compute on shards, in layouts that only the layer knows, and are skipped.
    Activation checkpointing runs a module again in backward, where it must call the same collectives. The next forward
    drops what backward and the loss function recorded.
    """

    needs_samples = True

    def __init__(self, engine: Engine) -> None:
        model = engine.model
        self.classes = {name or MODEL: type(module).__name__ for name, module in _visible_modules(model)}
        self._last, self._stage = engine.pipeline.last_stage, 0
        self._sequence, self._context = model_parallel_of(engine.context).sequence, engine.context
        #: the model may add tokens of its own so that their number divides
        self._without_padding: Callable[[Tensor], Tensor] = getattr(model, "without_padding", lambda x: x)
        self._num_samples = self._num_tokens = 0
        self._counts: Counter[str] = Counter()
        self._forward: dict[str, dict[tuple[int, ...], Tensor]] = {}
        self._samples: dict[int, list[str]] = {}
        self._outputs: dict[tuple[int, str], dict[int, dict[tuple[int, ...], Tensor]]] = {}
        for name, module in _visible_modules(model):
            if name:
                module.register_forward_hook(lambda module, args, output, name=name: self._record(name, output))

    def before_forward(self, stage: int, microbatch: int, samples: Any) -> None:
        if microbatch not in self._samples:  # before the model can write to them
            self._samples[microbatch] = sample_keys(samples)
        self._num_samples = len(self._samples[microbatch])
        self._num_tokens = sequence_length(samples) if self._sequence is not None else 0
        self._stage, self._forward = stage, {}
        self._counts.clear()

    def after_forward(self, stage: int, microbatch: int, output: Any) -> None:
        if stage == self._last:
            self._record(MODEL, output)
        for title, by_shape in self._forward.items():
            self._outputs.setdefault((stage, title), {})[microbatch] = by_shape
        self._forward = {}

    def take(self) -> tuple[list[str], list[Output]]:
        """Return the keys of the samples since the last call, and the outputs that all their microbatches have."""
        order, outputs = sorted(self._samples), []
        for (stage, title), parts in self._outputs.items():
            shapes = [shape for shape in parts[min(parts)] if all(shape in parts.get(number, ()) for number in order)]
            by_shape = {shape: torch.cat([parts[number][shape] for number in order]) for shape in shapes}
            outputs.append(Output(title, stage, by_shape))
        samples = [key for microbatch in order for key in self._samples[microbatch]]
        self._outputs, self._samples = {}, {}
        return samples, outputs

    @torch.no_grad()
    def _record(self, name: str, output: Any) -> None:
        self._counts[name] += 1
        call = f", call {self._counts[name]}" if self._counts[name] > 1 else ""
        for path, tensor in tensors(output):
            value = self._without_padding(local(to_whole(tensor.detach())))
            if value.dim() and len(value) == self._num_samples:
                title = name + call + (f", output{path}" if path else "")
                self._forward[title] = {tuple(x.shape[1:]): row_fingerprints(x) for x in self._candidates(value)}

    def _candidates(self, x: Tensor) -> Iterator[Tensor]:
        """Yield an output, and its all-gather along each dim that may be this rank's tokens. Collective."""
        yield x
        if self._sequence is None:
            return
        num_local = self._sequence.padded_length(self._num_tokens) // self._sequence.num_shards
        order = self._sequence.order(num_local, x.device)[: self._num_tokens]
        group = self._context.group(self._sequence.axes)
        for dim in range(1, x.dim()):
            if x.shape[dim] == num_local:
                yield collectives.all_gather(x.contiguous(), group, dim).wait().index_select(dim, order)


def _visible_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield all modules by name, except those inside our layers."""
    inside: str | None = None
    for name, module in model.named_modules():  # children follow their parent
        if inside is None or not name.startswith(inside):
            yield name, module
            inside = (f"{name}." if name else "") if isinstance(module, Layer) else None


# -- dropout ----------------------------------------------------------------------------------------------

#: functions of torch.nn.functional that draw masks -> the name and position of the argument with the rate
_DRAWING = {"dropout": ("p", 1), "scaled_dot_product_attention": ("dropout_p", 4)}


def disable_torch_dropout(model: nn.Module) -> None:
    """Turn off torch's own dropout in this process: its modules and its functions.

    The masks of torch's modules, ``F.dropout`` and ``F.scaled_dot_product_attention`` come from a generator and so
    depend on the plan; those of `colossus.layers.Dropout` do not.
    """
    for module in model.modules():
        key = "p" if isinstance(module, _DropoutNd) else "dropout"
        if key == "p" or isinstance(module, nn.MultiheadAttention | nn.RNNBase):
            setattr(module, key, 0.0)
    for name, (key, place) in _DRAWING.items():
        setattr(F, name, _without_rate(getattr(F, name), key, place))


def _without_rate(function: Callable[..., Any], key: str, place: int) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        if len(args) > place:
            return function(*args[:place], 0.0, *args[place + 1 :], **kwargs)
        return function(*args, **{**kwargs, key: 0.0})

    return call
