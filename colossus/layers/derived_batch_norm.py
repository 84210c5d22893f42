"""Classes derived from torch's batch norms: their own forward, with the statistics of all ranks' samples."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from colossus.comm.autograd import is_recomputation
from colossus.context.parallel_context import current_context
from colossus.context.program import Subject
from colossus.error_place import located_error
from colossus.layers.batch_norm import norm_of_batch, statistics_group
from colossus.layers.forward_under import ForwardUnder
from colossus.layers.model_parallel import model_parallel_of
from colossus.sharded_tensor.tensor import ShardedTensor


class DerivedBatchNorm(ForwardUnder):
    """A forward in which ``F.batch_norm`` takes the statistics of a batch from all ranks, as `layers.BatchNorm1d` does.

    The rest of the forward does not change. A recomputation changes neither running statistics nor their count.

    Raises:
        ValueError: the class derives from ``SyncBatchNorm``, which sums over processes itself; or a forward splits
            tokens, or computes statistics of several ranks' samples without ``F.batch_norm``.
    """

    def __init__(self, module: nn.Module, name: str) -> None:
        self.title = f"{name or 'the model'} ({type(module).__name__})"
        if isinstance(module, nn.SyncBatchNorm):
            raise ValueError(
                f"{self.title} derives from nn.SyncBatchNorm, whose forward sums over all processes under any plan: "
                f"derive it from nn.BatchNorm1d, 2d or 3d, whose statistics colossus.parallelize takes from all ranks"
            )
        super().__init__(module)
        self._parallel = model_parallel_of(current_context())
        self._parallel.interleaves_microbatches = True
        self._subject, self._num_norms = Subject([self.title]), 0

    @contextmanager
    def mode(self) -> Iterator[None]:
        count = getattr(self.module, "num_batches_tracked", None) if is_recomputation() else None
        before, self._num_norms = None if count is None else count.clone(), 0
        try:
            with _Norms(self):
                yield
        finally:  # checkpointing ends a recomputation by an exception
            if count is not None:
                count.copy_(before)
        group = statistics_group(self._parallel, is_training=self.module.training)
        if self.module.training and not self._num_norms and group.size > 1:
            raise located_error(
                f"{self.title} derives from nn.BatchNorm, but does not call F.batch_norm: its statistics would cover "
                f"the samples of one of {group.size} ranks. Call F.batch_norm or super().forward, or leave it so by "
                f"the rule 'torch'"
            )

    def batch_norm(
        self,
        input: Tensor,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Tensor:
        """Return the result of ``F.batch_norm`` in one process."""
        self._num_norms += 1
        if isinstance(input, ShardedTensor):
            raise located_error(
                f"{self.title}: its statistics need all tokens, but a rank has a part of them: {input!r}"
            )
        if not training:
            return F.batch_norm(input, running_mean, running_var, weight, bias, False, momentum, eps)
        if is_recomputation():
            running_mean = running_var = None
        group = statistics_group(self._parallel, is_training=self.module.training)
        if group.size > 1:
            group.program.note(self._subject)
        return norm_of_batch(input, running_mean, running_var, weight, bias, momentum, eps, group)


class _Norms(TorchFunctionMode):
    def __init__(self, norm: DerivedBatchNorm) -> None:
        super().__init__()
        self._norm = norm

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is F.batch_norm:
            return self._norm.batch_norm(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))
