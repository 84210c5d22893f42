"""Log-uniform samples, and the loss of a softmax over one."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers.training import config_of, run_cases

import colossus
from colossus import layers
from colossus.models.gpt import GPT
from colossus.sparse import sampled_softmax as log_uniform

HIDDEN, CLASSES = 5, 23


def test_probabilities_are_zipfs() -> None:
    p = log_uniform.probability(np.arange(CLASSES), CLASSES)
    assert p.sum() == pytest.approx(1.0, abs=1e-12)
    assert p[0] == pytest.approx(math.log(2) / math.log(CLASSES + 1))
    assert p[-1] == pytest.approx(math.log((CLASSES + 1) / CLASSES) / math.log(CLASSES + 1))


def test_a_class_is_as_often_in_a_sample_as_expected() -> None:
    samples, found, expected = 4000, Counter[int](), np.zeros(CLASSES)
    for key in range(samples):
        drawn = log_uniform.sample(key, 6, CLASSES)
        assert len(set(drawn.classes.tolist())) == 6
        found.update(drawn.classes.tolist())
        expected += drawn.expected_count(np.arange(CLASSES))
    counts = np.array([found[each] for each in range(CLASSES)])
    # given the number of draws the formula is an approximation (TensorFlow's): of the sum it is off by up to 4 %
    assert (np.abs(counts - expected) < 0.04 * expected + 5 * np.sqrt(expected)).all()


def test_samples_follow_from_their_key_alone() -> None:
    first, again, other = (log_uniform.sample(key, 9, 1000) for key in (1, 1, 2))
    assert first.classes.tolist() == again.classes.tolist() != other.classes.tolist()
    everything = log_uniform.sample(5, CLASSES, CLASSES)
    assert sorted(everything.classes.tolist()) == list(range(CLASSES))
    assert everything.num_draws > CLASSES


def layer(num_samples: int, num_classes: int = CLASSES, std: float = 1.0, **options: Any) -> layers.SampledSoftmax:
    torch.manual_seed(0)
    made = layers.SampledSoftmax(HIDDEN, num_classes, num_samples, dtype=torch.float64, **options)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_(0, std)
    return made


def test_the_gradient_is_near_that_of_the_whole_softmax() -> None:
    """Over many steps, on average; without the correction it is not."""
    made = layer(60, 200, 0.3)
    x, labels = torch.randn(8, HIDDEN, dtype=torch.float64), torch.randint(0, 200, (8,))
    whole = F.cross_entropy(x @ made.weight.t() + made.bias[:, 0], labels, reduction="sum")
    (want,) = torch.autograd.grad(whole, made.weight)
    total = torch.zeros_like(want)
    steps = 60
    for step in range(steps):
        made.context.rng.move_to(step, 0)
        made(x, labels)[0].backward()
        total += made.weight.grad.to_dense() / steps
        made.weight.grad = None
    made.context.rng.move_to(0, 0)
    near = ((total - want).norm() / want.norm()).item()
    assert near < 0.04
    biased = (_gradient_without_correction(made, x, labels, steps) - want).norm() / want.norm()
    assert biased > 2 * near


def _gradient_without_correction(
    made: layers.SampledSoftmax, x: torch.Tensor, labels: torch.Tensor, steps: int
) -> torch.Tensor:
    total = torch.zeros_like(made.weight)
    for step in range(steps):
        made.context.rng.move_to(step, 0)
        negatives = torch.zeros(made.num_classes, dtype=torch.bool)
        negatives[torch.from_numpy(made.sample().classes)] = True
        logits = x @ made.weight.t() + made.bias[:, 0]
        kept = negatives | F.one_hot(labels, made.num_classes).bool()
        loss = F.cross_entropy(logits.masked_fill(~kept, float("-inf")), labels, reduction="sum")
        total += torch.autograd.grad(loss, made.weight)[0] / steps
    made.context.rng.move_to(0, 0)
    return total


def test_accidental_hits_and_labels_that_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    made = layer(1, bias=False)
    assert made.bias is None
    (negative,) = made.sample().classes.tolist()
    x = torch.randn(3, HIDDEN, dtype=torch.float64, requires_grad=True)
    with torch.no_grad():
        x[2] = float("nan")
    loss, count = made(x, torch.tensor([negative, negative, -100]))
    assert (loss.item(), int(count)) == (0.0, 2)  # nothing is left beside the label
    loss.backward()
    assert x.grad is not None
    assert torch.equal(x.grad, torch.zeros_like(x))
    nothing, count = made(x, torch.full((3,), -100))
    assert (nothing.item(), int(count)) == (0.0, 0)
    monkeypatch.setattr("colossus.sparse.sampled_softmax._BLOCK", 4)
    labels = torch.tensor([0, 22, 7])
    x = torch.randn(3, HIDDEN, dtype=torch.float64, requires_grad=True)
    whole, _ = made.eval()(x, labels)
    assert not whole.requires_grad
    torch.testing.assert_close(whole, F.cross_entropy(x @ made.weight.t(), labels, reduction="sum").detach())


def test_a_tied_table_is_dense() -> None:
    with pytest.raises(ValueError, match="cannot be tied to an embedding with sparse=True"):
        colossus.build(lambda: GPT(sparse_embeddings=True))


def test_a_gpt_with_a_sparse_table_trains_as_with_a_dense_one() -> None:
    """In a pipeline; SGD, for which rows that are not touched stay anyway."""
    more: dict[str, Any] = dict(optimizer=dict(type="SGD", lr=0.5, weight_decay=0.0))
    sparse = dict(tie_embeddings=False, sparse_embeddings=True)
    reference = run_cases(1, {"dense": config_of({}, 3, "fp64", model=dict(tie_embeddings=False), **more)}, 3)
    plan = dict(pipeline=2, data=2, strategy="hybrid")
    config = config_of(plan, 3, "fp64", model=sparse, schedule=dict(microbatches=2), **more)
    for trace in run_cases(4, {"sparse": config}, 3)["sparse"]:
        assert trace.losses == pytest.approx(reference["dense"][0].losses, rel=1e-11)
        assert trace.norms == pytest.approx(reference["dense"][0].norms, rel=1e-11)
