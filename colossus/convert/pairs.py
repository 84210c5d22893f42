"""Which linears of a model that is not changed can be column/row pairs: found by a run of it on the meta device.

In that run each linear that is given whole features gives split ones, as a column linear does, and one that is given
split features takes them, as a row linear does. What is between them runs on `ShardedTensor`s of the shapes that a rank
has, under the rules of these, forward and backward: what is refused there would be refused in a train step, so those
columns are whole in the next run. The first run in which nothing is refused has the pairs. There is a run for each
example (with and without a mask, say).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from colossus.convert.pair_trial import PairTrial, what_it_says
from colossus.convert.past_uses import WHY as USED_PAST
from colossus.convert.past_uses import of_any_layer, weights_used_past
from colossus.convert.swap import holders_of, is_linear, why_not_its_class
from colossus.layers.model_parallel import ModelParallel


@dataclass(frozen=True)
class Pairs:
    """The column/row pairs of a model.

    Attributes:
        splits: name of a linear -> ``"column"`` or ``"row"``.
        shared: columns of one module that are given the same tensor, for `colossus.layers.linear.share_input`.
        reasons: name of any other linear -> why it is whole.
        used_past: names of modules whose weight is used otherwise than by a call of them.
    """

    splits: Mapping[str, str] = field(default_factory=dict)
    shared: tuple[tuple[str, ...], ...] = ()
    reasons: Mapping[str, str] = field(default_factory=dict)
    used_past: Collection[str] = ()


def find_pairs(
    make: Callable[[], nn.Module], examples: Sequence[Any], parallel: ModelParallel, whole: Container[str] = ()
) -> Pairs:
    """Return the column/row pairs among the linears of a model. Layers of one number or another decide alike.

    Args:
        make: makes a model on meta, for one run.
        examples: inputs of the model, with the samples of one rank, as of `run_on_meta`: pairs hold in all of them.
            One that the model does not take is left out.
        whole: names of linears that are no candidates.

    Raises:
        ValueError: for a forward that does not run on meta with any of the examples.
    """
    model = make()
    linears = {name: module for name, module in model.named_modules() if is_linear(module) and name not in whole}
    reasons = _not_alone(model, linears)
    running, used_past = _running(make, examples)
    reasons |= dict.fromkeys(used_past, USED_PAST)
    while True:
        candidates = [name for name in linears if name not in reasons]
        trials: list[PairTrial] = []
        refused: dict[str, str] = {}
        for example in running:
            trials.append(PairTrial(make(), parallel, candidates))
            refused = trials[-1].run(example) or _of_two_roles(trials)
            if refused:
                break
        else:
            return _of_all(trials, candidates, reasons, used_past)
        for name in candidates:
            for other, why in refused.items():
                if of_any_layer(name) == of_any_layer(other):
                    reasons.setdefault(name, why)


def _running(make: Callable[[], nn.Module], examples: Sequence[Any]) -> tuple[list[Any], set[str]]:
    """Return the examples with which a model runs on meta, and the modules whose weights it uses past them then."""
    running: list[Any] = []
    used_past: set[str] = set()
    errors: list[Exception] = []
    for example in examples:
        model = make()
        try:
            used_past |= weights_used_past(model, example)
            running.append(example)
        except Exception as error:
            errors.append(error)
    if not running:
        raise ValueError(
            f"{type(model).__name__} does not run on the meta device, so no pairs are found: {what_it_says(errors[0])}"
        ) from errors[0]
    return running, used_past


def _of_two_roles(trials: Sequence[PairTrial]) -> dict[str, str]:
    """Return why linears are none of a pair that were a column in one of the runs and a row in another."""
    roles: dict[str, set[str]] = defaultdict(set)
    for trial in trials:
        for name, role in trial.roles.items():
            roles[name].add(role)
    return {name: "is called with whole and with split features" for name, several in roles.items() if len(several) > 1}


def _of_all(
    trials: Sequence[PairTrial], candidates: Iterable[str], reasons: dict[str, str], used_past: Collection[str]
) -> Pairs:
    """Return the pairs that hold in all of these runs."""
    roles: dict[str, str] = {}
    shared = trials[0].shared()
    for trial in trials:
        roles |= trial.roles
        reasons = trial.reasons | reasons
        shared = tuple(group for group in shared if group in trial.shared())
    uncalled = {name: "the forward does not call it" for name in candidates if name not in roles}
    return Pairs(roles, shared, uncalled | reasons, used_past)


def _not_alone(model: nn.Module, linears: Mapping[str, nn.Module]) -> dict[str, str]:
    """Name of a linear -> why it is no candidate, of those that share a parameter or are more than their class."""
    holders, reasons = holders_of(model), {}
    for name, module in linears.items():
        others = [
            other or type(model).__name__
            for parameter in module._parameters.values() if parameter is not None
            for other, holder, _ in holders[id(parameter)] if holder is not module
        ]  # fmt: skip
        if others:
            reasons[name] = f"shares a parameter with {', '.join(dict.fromkeys(others))}"
        elif why := why_not_its_class(module):
            reasons[name] = why
    return reasons
