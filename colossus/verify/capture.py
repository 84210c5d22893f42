"""What a run computes on one rank: outputs of modules in each forward, parameters, buffers and their gradients."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from colossus.comm import collectives
from colossus.engine.engine import Engine
from colossus.engine.inputs import sequence_length
from colossus.layers.layer import Layer
from colossus.layers.model_parallel import model_parallel_of
from colossus.layout.layout import Box
from colossus.layout.parameter import LogicalParameter
from colossus.layout.split_parameter import as_shards
from colossus.nest import tensors
from colossus.schedule.executor import StepObserver
from colossus.sharded_tensor.regions import local, to_whole
from colossus.state.parameters import buffers_of, parameter_boxes

MODEL = "the model"
"""Name of the output of the full model."""


class Held(NamedTuple):
    """What this rank holds of a parameter, its gradient or a buffer.

    Attributes:
        name: logical name in the full model.
        box: (start, stop) of every dim of the full shape.
        value: of the size of the box, on the CPU.
        logical: None of a buffer.
    """

    name: str
    box: Box
    value: Tensor
    logical: LogicalParameter | None = None


def held_weights(engine: Engine) -> list[Held]:
    """This rank's boxes of all parameters, and its buffers."""
    found = list(held_parameters(engine, lambda param: param.data))
    for name, entry in buffers_of(engine.model).items():
        assert isinstance(entry.value, Tensor)
        found.append(Held(name, tuple((0, size) for size in entry.shape), entry.value.detach().cpu().clone()))
    return found


def held_parameters(engine: Engine, tensor_of: Callable[[nn.Parameter], Tensor | None]) -> Iterator[Held]:
    """This rank's boxes of parameters, or of their gradients where there are some."""
    for each in parameter_boxes(engine.model, engine.context, (), replicas_differ=False):
        with as_shards():
            whole = tensor_of(each.parameter)
            if whole is None:
                continue
            value = each.logical.local(whole.to_dense() if whole.is_sparse else whole).detach()
            value = value[tuple(slice(0, stop - start) for start, stop in each.box)]  # without padding
            held = Held(each.name, each.box, value.cpu().clone(), each.logical)
        yield held


# -- outputs ----------------------------------------------------------------------------------------------


class Output(NamedTuple):
    """What a call of a module has returned for all samples of this rank in a step.

    Attributes:
        title: ``block, call 2, output[0]``.
        stage: the pipeline stage that called it.
        by_shape: shape of one sample -> `row_fingerprints` of the samples. Where ranks split sequences a dim that may
            be tokens is taken to be whole as well.
    """

    title: str
    stage: int
    by_shape: dict[tuple[int, ...], Tensor]


class ForwardCapture(StepObserver):
    """Fingerprints the outputs of every module whose output is in the whole layout, or can be moved to it.

    It observes the stages: a pipeline does not call the model itself, so the model's output is what the last stage
    returns. Modules inside of one of our layers compute on shards, in layouts that only the layer knows, and are
    skipped. Activation checkpointing runs a module again in backward, where it must call the same collectives: what is
    seen there is dropped when the next forward begins, like what the loss function calls.
    """

    needs_samples = True

    def __init__(self, engine: Engine) -> None:
        model = engine.model
        self.classes = {name or MODEL: type(module).__name__ for name, module in _visible_modules(model)}
        self._last, self._stage = engine.pipeline.last_stage, 0
        self._sequence, self._context = model_parallel_of(engine.context).sequence, engine.context
        #: of a model that adds tokens of its own to make them divide
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
        for title, held in self._forward.items():
            self._outputs.setdefault((stage, title), {})[microbatch] = held
        self._forward = {}

    def take(self) -> tuple[list[str], list[Output]]:
        """Keys of the samples since the last call, and the outputs that all their microbatches have."""
        order, outputs = sorted(self._samples), []
        for (stage, title), held in self._outputs.items():
            shapes = [shape for shape in held[min(held)] if all(shape in held.get(each, ()) for each in order)]
            by_shape = {shape: torch.cat([held[each][shape] for each in order]) for shape in shapes}
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
        """An output as it is, and with the tokens of all ranks in each dim that may be this rank's. Collective."""
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
    """All modules by name, without those inside of our layers."""
    inside: str | None = None
    for name, module in model.named_modules():  # children follow their parent
        if inside is None or not name.startswith(inside):
            yield name, module
            inside = (f"{name}." if name else "") if isinstance(module, Layer) else None


def row_fingerprints(x: Tensor) -> Tensor:
    """For each row of dim 0 its norm and its projection on a fixed pattern, [rows, 2] float64.

    A change of any element changes the projection by as much as it changes the norm of the row, but for directions
    that are orthogonal to the pattern, which no mistake is by chance.
    """
    x = torch.view_as_real(x) if x.is_complex() else x
    flat = x.double().reshape(len(x), -1) if x.numel() else x.new_zeros((len(x), 1), dtype=torch.float64)
    number = torch.arange(1, flat.shape[1] + 1, dtype=torch.float64, device=x.device)
    return torch.stack((torch.linalg.vector_norm(flat, dim=1), flat @ torch.cos(1.7 * number)), dim=1).cpu()


def sample_keys(batch: Any) -> list[str]:
    """A hash for each sample of a batch: equal keys mean equal bits, wherever the sample stands in which batch."""
    leaves = [leaf for _, leaf in tensors(batch) if leaf.dim()]
    leaves = [leaf.detach().cpu().contiguous() for leaf in leaves if len(leaf) == len(leaves[0])]
    samples = zip(*leaves, strict=True)
    return [
        hashlib.blake2b(b"".join(x.reshape(-1).view(torch.uint8).numpy().tobytes() for x in sample)).hexdigest()
        for sample in samples
    ]


# -- dropout ----------------------------------------------------------------------------------------------

#: functions of torch.nn.functional that draw masks: the argument that is the rate, and its position
_DRAWING = {"dropout": ("p", 1), "scaled_dot_product_attention": ("dropout_p", 4)}


def disable_torch_dropout(model: nn.Module) -> None:
    """Turn off the dropout of torch's modules, ``F.dropout`` and ``F.scaled_dot_product_attention`` in this process
    from here on: its masks follow from a generator, and so from the plan, as those of `colossus.layers.Dropout` do not.
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
