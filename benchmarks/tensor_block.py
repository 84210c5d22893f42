"""A transformer block on one rank in its residual layout: plain torch, colossus, torch's DTensor."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.peers.plain import Block
from benchmarks.tensor_cases import DTENSOR, PLAIN, Case
from benchmarks.workload import State, Workload, fuse_qkv
from colossus import build
from colossus.checkpoint import full_state_dict, load_full_state_dict
from colossus.comm import accounting
from colossus.comm.accounting import Counter
from colossus.gradients.gradient_axes import gradient_sum_axes
from colossus.layers import TransformerBlock
from colossus.layers.model_parallel import model_parallel_of
from colossus.layout.layout import Box
from colossus.sharded_tensor.placement import Placement
from colossus.sharded_tensor.tensor import mark, plain

OUTPUT, INPUT_GRADIENT = "output", "gradient of the input"


def block_state(workload: Workload) -> State:
    """Return random weights by logical name, of biases and norms, too: a zero that is added twice looks right."""
    prefix = "blocks.0."
    generator = torch.Generator().manual_seed(workload.seed + 2)
    state = {name.removeprefix(prefix): x for name, x in workload.state().items() if name.startswith(prefix)}
    return {
        name: x + 0.1 * torch.randn(x.shape, generator=generator) if x.dim() == 1 else x for name, x in state.items()
    }


def block_inputs(workload: Workload) -> tuple[Tensor, Tensor]:
    """Return x and the gradient of the output, whole."""
    generator = torch.Generator().manual_seed(workload.seed + 3)
    shape = (workload.batch, workload.tokens, workload.hidden)
    return torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)


@dataclass(frozen=True)
class Counted:
    """Collectives and bytes that a rank sends."""

    calls: int
    bytes: float


@dataclass(frozen=True)
class Owed:
    """Bytes of the sums of gradients that the engine makes once per step: of matrices, of biases and norms."""

    matrices: float = 0.0
    vectors: float = 0.0


class Run:
    """The block of plain torch, in one process."""

    def __init__(self, case: Case, workload: Workload, rank: int) -> None:
        self.case, self.workload, self.device = case, workload, torch.device(workload.device)
        self.module = self.make(rank)
        whole = block_inputs(workload)
        self.box = self.outer_box()
        self.x, self.dy = (cut(x, self.box).to(self.device, copy=True) for x in whole)
        self.x.requires_grad_()

    def make(self, rank: int) -> nn.Module:
        with self.device:
            module = Block(self.workload.hidden, self.workload.heads)
        module.load_state_dict(fuse_qkv(block_state(self.workload)))
        return module

    def outer_box(self) -> Box:
        """Return the rank's shard of x and y."""
        return tuple((0, size) for size in (self.workload.batch, self.workload.tokens, self.workload.hidden))

    def forward(self) -> Tensor:
        return self.module(self.x)

    def gradients(self) -> State:
        """Return the gradients of whole parameters, query, key and value fused; all ranks must call."""
        return {name: param.grad for name, param in self.module.named_parameters() if param.grad is not None}

    def step(self, index: int = 0) -> None:
        """Run forward and backward; the gradients that the engine would sum stay as they are made."""
        self.x.grad = None
        self.module.zero_grad(set_to_none=True)
        self.forward().backward(self.dy)

    def values(self) -> Iterator[tuple[str, Tensor, Box | None]]:
        """Yield what one step gives: name, value, and its box of the whole (None: all of it)."""
        self.step()
        assert self.x.grad is not None
        yield OUTPUT, self.forward().detach(), self.box
        yield INPUT_GRADIENT, self.x.grad, self.box
        for name, gradient in self.gradients().items():
            yield f"gradient of {name}", gradient, None

    def count(self) -> Counted:
        """Return what forward and backward send."""
        with accounting.count() as moved:
            self.step()
        return Counted(moved.calls(), moved.bytes())

    def owed(self) -> Owed:
        return Owed()

    def close(self) -> None:
        """Leave the other ranks."""

    def shards(self) -> list[Tensor]:
        """Return the stored shards of the parameters."""
        return [local_part(param.detach()) for param in self.module.parameters()]


class ColossusRun(Run):
    def make(self, rank: int) -> nn.Module:
        w = self.workload
        self.context = self.case.context(rank, device=w.device)
        self.parallel = model_parallel_of(self.context)
        module = build(lambda: TransformerBlock(w.hidden, w.heads), self.context)
        load_full_state_dict(module, block_state(w), self.context)
        return module

    def outer_box(self) -> Box:
        layout = self.parallel.regions.residual.at(3)
        shape = [stop for _, stop in super().outer_box()]
        return layout.box(shape, self.context.grid.sizes, self.context.coordinates)

    def forward(self) -> Tensor:
        outer = self.parallel.regions.residual
        return plain(self.module(mark(self.x, Placement.standard(self.parallel, outer, outer, self.x.dim()))))

    def gradients(self) -> State:
        for param in self.module.parameters():
            axes = gradient_sum_axes(param, self.context)
            if axes and param.grad is not None:
                on_host = param.grad.cpu()  # where it is, unless it is on an accelerator
                dist.all_reduce(on_host, group=self.context.group(axes).process_group)
                param.grad.copy_(on_host)
        return fuse_qkv(full_state_dict(self.module, self.context, gradients=True))

    def count_step(self, microbatches: int, scope: str) -> Counted:
        """Return what a step of some microbatches sends, each of the whole batch, under a scope of weights."""
        weights = self.parallel.weights
        usual, weights.scope = weights.scope, scope
        with accounting.count() as moved:
            weights.begin_step()
            for index in range(microbatches):
                y = self.forward()
                if index == microbatches - 1:
                    weights.set_last_microbatch()
                y.backward(self.dy)
            weights.end_step()
        weights.scope = usual
        return Counted(moved.calls(), moved.bytes())

    def owed(self) -> Owed:
        sent = [0.0, 0.0]
        for param in self.module.parameters():
            n = self.context.size(gradient_sum_axes(param, self.context))
            sent[param.dim() == 1] += accounting.sent("all_reduce", n, param.nbytes)
        return Owed(*sent)

    def close(self) -> None:
        self.context.close()


class DTensorRun(Run):
    """`parallelize_module` with the plan of the train-step benchmark: x whole on every rank, two pairs of linears."""

    def make(self, rank: int) -> nn.Module:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor.parallel import parallelize_module

        from benchmarks.peers.dtensor import block_plan

        w, world = self.workload, self.case.world
        module = Block(w.hidden, w.heads, ways=world)
        module.load_state_dict(fuse_qkv(block_state(w), interleave=world))
        prefix = "blocks.0."
        plan = {name.removeprefix(prefix): style for name, style in block_plan(1).items() if name.startswith(prefix)}
        return parallelize_module(module, init_device_mesh("cpu", (world,)), plan)

    def gradients(self) -> State:
        out = {}
        for name, gradient in super().gradients().items():
            whole = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
            if ".qkv." in name:  # [rank, part, rows] to [part, rank, rows]
                whole = whole.unflatten(0, (self.case.world, 3, -1)).transpose(0, 1).flatten(0, 2)
            out[name] = whole
        return out

    def count(self) -> Counted:
        counter = Counter()
        with _FunctionalCounter(counter):
            self.step()
        return Counted(counter.calls(), counter.bytes())


class _FunctionalCounter(TorchDispatchMode):
    """Counts torch's functional collectives as `colossus.comm.accounting` counts ours."""

    #: torch's operation -> ours
    OPERATIONS = {
        "all_reduce": "all_reduce",
        "all_gather_into_tensor": "all_gather",
        "reduce_scatter_tensor": "reduce_scatter",
        "all_to_all_single": "all_to_all",
    }
    #: operations of the same namespace that move nothing
    SILENT = ("wait_tensor", "_wrap_tensor_autograd")

    def __init__(self, counter: Counter) -> None:
        super().__init__()
        self.counter = counter

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(hasattr(kind, "_local_tensor") for kind in types):  # a DTensor
            return NotImplemented  # it comes again with what is inside
        namespace, _, name = func.name().partition("::")
        if namespace == "_c10d_functional" and name not in self.SILENT:
            group: Any = next(arg for arg in reversed(args) if isinstance(arg, str))
            operation, ranks = self.OPERATIONS[name.rstrip("_")], _resolve_process_group(group).size()
            self.counter.add(name, "tensor", args[0].dtype, accounting.sent(operation, ranks, args[0].nbytes))
        return func(*args, **(kwargs or {}))


def local_part(tensor: Tensor) -> Tensor:
    """Return the tensor with storage inside of a wrapper (DTensor, a collective not yet waited for)."""
    for name in ("_local_tensor", "elem"):
        inner = getattr(tensor, name, None)
        if inner is not None:
            return local_part(inner)
    return tensor


def cut(whole: Any, box: Box | None) -> Any:
    return whole if box is None else whole[tuple(slice(*span) for span in box)]


#: mode -> its class, where it is none of colossus
RUNS: dict[str, type[Run]] = {PLAIN: Run, DTENSOR: DTensorRun}
