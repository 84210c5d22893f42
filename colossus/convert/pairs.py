"""The column/row pairs among the linears of an unchanged model, found by runs of it on the meta device.

In such a run each linear with whole features as its input returns split ones, as a column linear does, and one with
split features takes them, as a row linear does. The code between them runs on `ShardedTensor`s of the shapes of a rank,
under their rules, forward and backward. An error there would be an error of a train step, so those columns are whole in
the next run. The first run without an error has the pairs. There is a run for each example (with and without a mask,
say).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from colossus.convert.pair_trial import PairTrial, one_line
from colossus.convert.past_uses import WHY as USED_PAST
from colossus.convert.past_uses import of_any_layer, weights_used_past
from colossus.convert.swap import extra_behaviour, holders_of, is_linear
from colossus.layers.model_parallel import ModelParallel


@dataclass(frozen=True)
class Pairs:
    """The column/row pairs of a model.

    Attributes:
        splits: name of a linear -> ``"column"`` or ``"row"``.
        shared: columns of one module with the same input tensor, for `colossus.layers.linear.share_input`.
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
    """Return the column/row pairs among the linears of a model. Layers that differ only in their number decide alike.

    Args:
        make: makes a model on meta, for one run.
        examples: inputs of the model for `run_on_meta`, with the samples of one rank: pairs must hold in all of them.
            An example that the model does not take is left out.
        whole: names of linears that are no candidates.

    Raises:
        ValueError: the forward runs on meta with none of the examples.
    """
    model = make()
    linears = {name: module for name, module in model.named_modules() if is_linear(module) and name not in whole}
    reasons = _unsuitable(model, linears)
    running, used_past = _running(make, examples)
    reasons |= dict.fromkeys(used_past, USED_PAST)
    while True:
        candidates = [name for name in linears if name not in reasons]
        trials: list[PairTrial] = []
        refused: dict[str, str] = {}
        for example in running:
            trials.append(PairTrial(make(), parallel, candidates))
            refused = trials[-1].run(example) or _with_two_roles(trials)
            if refused:
                break
        else:
            return _combine(trials, candidates, reasons, used_past)
        for name in candidates:
            for other, why in refused.items():
                if of_any_layer(name) == of_any_layer(other):
                    reasons.setdefault(name, why)


def _running(make: Callable[[], nn.Module], examples: Sequence[Any]) -> tuple[list[Any], set[str]]:
    """Return the examples that a model takes on meta, and the modules whose weights it then uses past them."""
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
            f"{type(model).__name__} does not run on the meta device, so no pairs are found: {one_line(errors[0])}"
        ) from errors[0]
    return running, used_past


def _with_two_roles(trials: Sequence[PairTrial]) -> dict[str, str]:
    """Return the linears that were a column in one of the runs and a row in another -> the reason."""
    roles: dict[str, set[str]] = defaultdict(set)
    for trial in trials:
        for name, role in trial.roles.items():
            roles[name].add(role)
    twofold = [name for name, roles_of_name in roles.items() if len(roles_of_name) > 1]
    return dict.fromkeys(twofold, "is called with whole and with split features")


def _combine(
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


def _unsuitable(model: nn.Module, linears: Mapping[str, nn.Module]) -> dict[str, str]:
    """Return name of a linear -> why it is no candidate: it shares a parameter, or its class does more."""
    holders, reasons = holders_of(model), {}
    for name, module in linears.items():
        others = [
            other or type(model).__name__
            for parameter in module._parameters.values() if parameter is not None
            for other, holder, _ in holders[id(parameter)] if holder is not module
        ]  # fmt: skip
        if others:
            reasons[name] = f"shares a parameter with {', '.join(dict.fromkeys(others))}"
        elif why := extra_behaviour(module):
            reasons[name] = why
    return reasons
