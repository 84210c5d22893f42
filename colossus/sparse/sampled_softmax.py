"""The loss of a softmax over very many classes, from a sample of them.

Samples are log-uniform (Zipfian), as TensorFlow's ``log_uniform_candidate_sampler`` draws them: class k of n has the
probability log((k + 2) / (k + 1)) / log(n + 1), which suits classes that are sorted by falling frequency.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from colossus.construct.initial_values import Constant, torch_linear
from colossus.error_place import located_error
from colossus.layers.embedding import check_range
from colossus.layers.layer import Layer
from colossus.layers.lookup import read_rows, row_of_each
from colossus.layout.layout import Layout
from colossus.layout.parameter import Initializer
from colossus.layout.redistribute import move
from colossus.rows.row_gradient import row_source
from colossus.sharded_tensor.regions import local, unwrap
from colossus.tensor_parallel.dtypes import product_dtype, to_wide_dtype
from colossus.tensor_parallel.matmul import product

#: the number of classes whose rows an evaluation reads at once
_BLOCK = 8192


@dataclass(frozen=True)
class LogUniformSample:
    """A sample of different classes.

    Attributes:
        classes: int64 [n], in the order in which they were drawn.
        num_classes: the number of classes from which they were drawn.
        num_draws: the number of draws, those of a class that was drawn before included.
    """

    classes: np.ndarray
    num_classes: int
    num_draws: int

    def expected_count(self, classes: Any, xp: Any = np) -> Any:
        """Return the expected count of each class in such a sample, of the shape of ``classes``; see `probability`.

        It is 1 - (1 - p) ** num_draws (TensorFlow's "candidate sampling algorithms").
        """
        return -xp.expm1(self.num_draws * xp.log1p(-probability(classes, self.num_classes, xp)))


def probability(classes: Any, num_classes: int, xp: Any = np) -> Any:
    """Return the probability of each class in one draw.

    Args:
        classes: an array, or a tensor of float64 where ``xp`` is torch; the result has its shape.
        num_classes: the number of classes.
        xp: numpy or torch.
    """
    return xp.log1p(1.0 / (classes + 1.0)) / math.log(num_classes + 1.0)


@lru_cache(maxsize=8)  # once for all microbatches of a step
def sample(key: int, num_samples: int, num_classes: int) -> LogUniformSample:
    """Draw until there are ``num_samples`` different classes; the same on every machine for the same key."""
    assert num_samples <= num_classes
    generator = np.random.Generator(np.random.Philox(key))
    drawn = np.empty(0, dtype=np.int64)
    while True:
        values = np.exp(generator.random(len(drawn) or 2 * num_samples) * math.log(num_classes + 1.0))
        fresh = np.clip(values.astype(np.int64) - 1, 0, num_classes - 1)  # rounding at the ends
        drawn = np.concatenate((drawn, fresh))
        first = np.sort(np.unique(drawn, return_index=True)[1])
        if len(first) >= num_samples:
            first = first[:num_samples]
            return LogUniformSample(drawn[first], num_classes, int(first[-1]) + 1)


class SampledSoftmax(Layer):
    """Output table, bias and loss of a softmax over a large vocabulary (Jean et al. 1412.2007, section 3).

    In training each token's loss is that of a softmax over its own class and a sample of ``num_samples`` classes. The
    sample is drawn log-uniformly, for classes sorted by falling frequency, once in a step, from (seed, step, name), so
    it is the same on all ranks and in all microbatches. As in TensorFlow's ``sampled_softmax_loss``, the logarithm of
    each class's expected count in the sample is subtracted from its logit, and a token leaves its own class out of the
    sample. So a step touches the rows of its labels and of the sample.

    In ``eval()`` the loss is that of the whole softmax, without a gradient. It is summed over blocks of rows, so that
    no rank has all rows at once.

    Args:
        hidden_size: the features of x.
        num_classes: the number of classes.
        num_samples: the number of different classes in the sample, at most ``num_classes``.
        bias: whether there is a bias.
        sparse: whether gradients of weight and bias are of the rows that were looked up.
        ignore_index: a label that is not counted.
        init: the initial values of the weight.
        bias_init: the initial values of the bias, by default zeros.
        dtype: the dtype of weight and bias.

    Shape:
        x [.., hidden_size], labels [..] in the whole layout -> (sum, count), scalars over the samples of this rank.
        weight [num_classes, hidden_size] is split by features like activations between blocks, or replicated where
        these do not divide. bias [num_classes, 1] is a table, too.

    Raises:
        ValueError: shapes do not fit, or a label is outside of the classes (checked on CPU).
    """

    def __init__(
        self,
        hidden_size: int,
        num_classes: int,
        num_samples: int,
        *,
        bias: bool = True,
        sparse: bool = True,
        ignore_index: int = -100,
        init: Initializer | None = None,
        bias_init: Initializer | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        hidden_size, num_classes, num_samples = map(operator.index, (hidden_size, num_classes, num_samples))
        if not 1 <= num_samples <= num_classes:
            raise located_error(
                f"SampledSoftmax: num_samples = {num_samples} different classes of num_classes = {num_classes}: give "
                f"1 to {num_classes}"
            )
        self.hidden_size, self.num_classes, self.num_samples = hidden_size, num_classes, num_samples
        self.sparse, self.ignore_index = sparse, ignore_index
        self.looked_up = self.split_between_blocks(hidden_size)
        layout = Layout(((), self.looked_up.features))
        init = init or torch_linear(hidden_size)
        self.weight = self.make_parameter({"": (num_classes, hidden_size)}, layout, init, dtype=dtype)
        bias_init, shape = bias_init or Constant(0.0), {"": (num_classes, 1)}
        self.bias = self.make_parameter(shape, Layout.whole(2), bias_init, dtype=dtype) if bias else None
        self.decide_gradients(self.weight, self.looked_up)
        self.decide_gradients(self.bias, self.parallel.regions.whole)

    def forward(self, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        x, placement = unwrap(x, self.parallel)
        labels = local(labels).long()
        x = move(x, placement.activation, self.looked_up, self.context)
        if labels.shape != x.shape[:-1]:
            raise located_error(
                f"{self.title}: labels have shape {tuple(labels.shape)}, x {tuple(x.shape)} on this rank"
            )
        is_counted = labels != self.ignore_index
        count, is_counted = is_counted.sum(), is_counted.reshape(-1)
        x, labels = x.reshape(-1, x.shape[-1]), labels.reshape(-1)
        left_out: Tensor | None = None
        if self._picks_tokens(x.device):  # then not even a NaN of a token that does not count matters
            counted = is_counted.nonzero().squeeze(1)
            x, labels = x.index_select(0, counted), labels.index_select(0, counted)
        else:
            left_out = ~is_counted
            x, labels = x.masked_fill(left_out.unsqueeze(1), 0.0), labels.masked_fill(left_out, 0)
        check_range(labels, self.num_classes, f"{self.title}: labels")
        x = x.to(product_dtype(x) or x.dtype)
        losses = self._sampled(x, labels) if self.training else self._whole(x, labels)
        return (losses if left_out is None else losses.masked_fill(left_out, 0.0)).sum(), count

    def _picks_tokens(self, device: torch.device) -> bool:
        """Return whether only tokens that count are computed.

        On an accelerator the host has to wait for their number, which is no loss where it waits for the number of
        distinct rows anyway.
        """
        return device.type == "cpu" or self.sparse or row_source(self.weight) is not None

    def sample(self) -> LogUniformSample:
        """Return the sample of this step."""
        rng = self.context.rng
        return sample(rng.key("negatives", rng.step, self.full_name), self.num_samples, self.num_classes)

    def _sampled(self, x: Tensor, labels: Tensor) -> Tensor:
        """Return the losses [t] of x [t, features] and labels [t] over the sample."""
        step_sample = self.sample()
        negatives = torch.from_numpy(step_sample.classes).to(labels.device, non_blocking=True)
        count, classes = len(labels), torch.cat((labels, negatives))
        rows = row_of_each(classes, self.weight, sparse=self.sparse).to(x.dtype)
        own = (to_wide_dtype(x) * to_wide_dtype(rows[:count])).sum(-1, keepdim=True)
        others = to_wide_dtype(product(x, rows[count:]))
        own, others = self._summed(own), self._summed(others)
        if self.bias is not None:
            bias = row_of_each(classes, self.bias, sparse=self.sparse).to(own.dtype)
            own, others = own + bias[:count], others + bias[count:].t()
        own = own - _log_expected(step_sample, labels, own.dtype).unsqueeze(1)
        others = others - _log_expected(step_sample, negatives, own.dtype)
        others = others.masked_fill(labels.unsqueeze(1) == negatives, float("-inf"))
        return -F.logsigmoid(own.squeeze(1) - others.logsumexp(1))

    @torch.no_grad()
    def _whole(self, x: Tensor, labels: Tensor) -> Tensor:
        """Return the losses [t] over all classes, without a gradient."""
        log_sum = torch.full(labels.shape, float("-inf"), dtype=to_wide_dtype(x).dtype, device=x.device)
        target = torch.zeros_like(log_sum)
        for start in range(0, self.num_classes, _BLOCK):
            stop = min(start + _BLOCK, self.num_classes)
            rows = read_rows(start, stop, self.weight).to(x.dtype)
            logits = self._summed(to_wide_dtype(product(x, rows)))
            if self.bias is not None:
                logits += read_rows(start, stop, self.bias).t().to(logits.dtype)
            log_sum = torch.logaddexp(log_sum, logits.logsumexp(1))
            here = (labels >= start) & (labels < stop)
            column = (labels - start).masked_fill(~here, 0).unsqueeze(1)
            target += logits.gather(1, column).squeeze(1).masked_fill(~here, 0.0)
        return log_sum - target

    def _summed(self, products: Tensor) -> Tensor:
        """Sum the products [t, n] of this rank's features over the ranks of all features."""
        whole = Layout.whole(2)
        features = Layout(whole.dims, partial=self.looked_up.features)
        return move(products, features, whole, self.context)

    def extra_repr(self) -> str:
        return f"{self.hidden_size}, {self.num_classes}, num_samples={self.num_samples}, bias={self.bias is not None}"


def _log_expected(step_sample: LogUniformSample, classes: Tensor, dtype: torch.dtype) -> Tensor:
    expected: Tensor = step_sample.expected_count(classes.double(), torch)
    return expected.log().to(dtype)
