"""What updates tables: the optimizer's form for rows, a rule of their own, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.long import but
from helpers.ranks import run_ranks
from helpers.tables import (
    CLASSES,
    RULES,
    SAMPLES,
    STEPS,
    TABLES,
    Run,
    Words,
    assert_same,
    batch_of,
    gathered_state,
    in_torch,
    loss_fn,
    own_part,
    train,
)
from torch import Tensor, nn

import colossus
from colossus.engine.nonfinite import NonFiniteGradients
from colossus.state.model_state_dict import full_state_dict

SGD = dict(type="SGD", lr=0.5)


def config_of(
    optimizer: dict[str, Any] | None = SGD, data: int = 1, way: str = "owners", **more: Any
) -> dict[str, Any]:
    ways = {"0.small.*": "dense", "*": way}
    plan = more.pop("plan", {})
    strategy = dict(type="hybrid", ways=ways) if data > 1 or plan else dict(type="all_reduce")
    config: dict[str, Any] = dict(
        parallel=dict(data=data, strategy=strategy, **plan),
        train={**dict(steps=STEPS, global_batch_size=SAMPLES, precision="fp64", seed=5), **more.pop("train", {})},
        device="cpu",
        **more,
    )
    return config if optimizer is None else config | {"optimizer": optimizer}


# -- lazy, and what that is not -----------------------------------------------------------------------------------


# -- whose optimizer ---------------------------------------------------------------------------------------------


def named_groups(rule: dict[str, Any], named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    tables = [param for name, param in named if name in TABLES]
    others = [param for name, param in named if name not in TABLES]
    groups = [{"params": others}, {"params": tables, "weight_decay": 0.0, **rule}]
    return torch.optim.AdamW(groups, lr=0.01)


def test_a_users_optimizer_is_the_configs() -> None:
    """Groups of one's own with ``row_rule``, and torch's AdamW as it is."""
    rule = dict(row_rule="rowwise_adagrad", lr=0.1, eps=1e-3)

    def body(rank: int) -> tuple[Run, Run, Run, Run]:
        of_config = train(config_of(RULES["rowwise_adagrad"][0], data=2))
        own = train(config_of(None, data=2), optimizer=lambda named: named_groups(rule, named))
        adam = train(config_of(dict(type="AdamW", lr=0.01), data=2))
        own_adam = train(config_of(None, data=2), optimizer=lambda named: named_groups({}, named))
        return of_config, own, adam, own_adam

    for of_config, own, adam, own_adam in run_ranks(2, body, with_context=False):
        assert_same(own, of_config, "row_rule", of_config.outputs)
        assert_same(own_adam, adam, "AdamW", adam.outputs)
        assert of_config.state["0.words.weight"].keys() == {"step", "sum"}
        assert adam.state["0.words.weight"].keys() == {"step", "exp_avg", "exp_avg_sq"}


# -- refused --------------------------------------------------------------------------------------------------------


class OwnAdam(torch.optim.AdamW):
    def step(self, closure: Any = None) -> None:
        super().step()


def refusals() -> dict[str, tuple[Any, Any, Any, str]]:
    """Section, model, function of an optimizer, what is said."""
    plain = lambda: nn.Sequential(nn.Linear(1 + 3, CLASSES))  # noqa: E731

    def given(make: Callable[[list[nn.Parameter]], Any]) -> Any:
        return lambda named: make([param for _, param in named])

    return {
        "tables without a table": (dict(type="AdamW", tables=dict(type="SGD")), plain, None, "but the model has none"),
        "a class without a form": (dict(type=torch.optim.NAdam), Words, None, "NAdam has no form for sparse gradients"),
        "an optimizer without a form": (
            *(None, Words, given(torch.optim.NAdam)),
            "0.words.weight has sparse gradients, but NAdam has no form for sparse gradients, which update only the "
            "rows that a step has looked up. AdamW, Adam, SparseAdam, Adagrad, SGD have one",
        ),
        "a step of one's own": (None, Words, given(lambda params: OwnAdam(params, weight_decay=0)), "OwnAdam has no"),
        "weight decay": (
            *(None, Words, given(lambda params: torch.optim.AdamW(params))),
            "its parameter group 0 has weight_decay or amsgrad, and holds 0.words.weight",
        ),
        "an unknown rule": (
            *(None, Words, lambda named: named_groups(dict(row_rule="lion"), named)),
            "no rule 'lion' for rows",
        ),
    }


def test_an_optimizer_that_does_not_fit_is_refused_before_the_first_step() -> None:
    def body(rank: int) -> dict[str, str]:
        messages = {}
        for name, (section, model, optimizer, _) in refusals().items():
            with pytest.raises(ValueError, match=r"table|sparse|rule") as caught:
                colossus.initialize(config_of(section, data=2), model=model, loss_fn=loss_fn, optimizer=optimizer)
            messages[name] = str(caught.value)
        return messages

    for messages in run_ranks(2, body, with_context=False):
        for name, (*_, words) in refusals().items():
            assert words in messages[name], (name, messages[name])


# -- gradients that are not finite, clipping --------------------------------------------------------------------------


def poison(engine: Any, rank: int, value: float) -> Any:
    """Let the gradient of the last lookups of one rank be ``value``: those of ``rare``."""
    if engine.context.rank != rank:
        return None
    return engine.model[0].rare.register_forward_hook(
        lambda module, args, out: out.register_hook(lambda gradient: gradient * value) and None
    )


@pytest.mark.parametrize("way", but(["dense", "gather"], ["dense", "gather", "owners"]))
@pytest.mark.rest("owners")
def test_a_row_gradient_that_is_not_finite_names_its_table(way: str) -> None:
    def body(rank: int) -> Any:
        problem = []
        for kind in ("skip", "raise"):
            config = config_of(dict(type="Adagrad", lr=0.1), data=2, way=way, train=dict(on_nonfinite=kind))
            engine = colossus.initialize(config, model=Words, loss_fn=loss_fn)
            engine.train_step(own_part(batch_of(0), engine))
            before = full_state_dict(engine.model, engine.context)
            state = gathered_state(engine)
            hook = poison(engine, 1, float("nan"))
            if kind == "skip":
                assert engine.train_step(own_part(batch_of(2), engine)).skipped
            else:
                with pytest.raises(NonFiniteGradients) as caught:
                    engine.train_step(own_part(batch_of(2), engine))
                problem = [str(caught.value), list(caught.value.parameters)]
            for name, value in full_state_dict(engine.model, engine.context).items():
                assert torch.equal(value, before[name]), name
            for name, entries in gathered_state(engine).items():
                for key, value in entries.items():
                    assert torch.equal(value, state[name][key]), (name, key)
            if hook is not None:
                hook.remove()
            engine.train_step(own_part(batch_of(3), engine))  # a loop that caught it goes on
            engine.close()
        return problem

    for words, parameters in run_ranks(2, body, with_context=False):
        assert words.startswith("step 2: the gradient of 0.rare.weight is not finite, the loss is finite"), words
        assert parameters == ["0.rare.weight"]


def test_elements_are_clipped() -> None:
    """``clip_grad_value``, the same for each way."""

    def body(rank: int) -> dict[str, tuple[list[dict[str, Tensor]], float]]:
        results = {}
        for data, way in ((2, "dense"), (2, "gather"), (2, "owners")):
            config = config_of(SGD, data, way, train=dict(clip_grad_value=1e-3))
            engine = colossus.initialize(config, model=Words, loss_fn=loss_fn)
            start = full_state_dict(engine.model, engine.context)
            result = engine.train_step(own_part(batch_of(0), engine))
            end = full_state_dict(engine.model, engine.context)
            engine.close()
            results[way] = [start, end], result.grad_norm
        return results

    (results, _) = run_ranks(2, body, with_context=False)
    (start, end), norm = results["owners"]
    model = Words(nn).double()
    model.load_state_dict(start)
    total, count = loss_fn(model(batch_of(0)[0]), batch_of(0))
    (total / count).backward()
    square = 0.0
    for name, param in model.named_parameters():
        assert param.grad is not None
        gradient = param.grad.to_dense() if param.grad.is_sparse else param.grad
        square += float(gradient.square().sum())
        torch.testing.assert_close(end[name], start[name] - 0.5 * gradient.clamp(-1e-3, 1e-3), rtol=1e-10, atol=1e-12)
    assert norm == pytest.approx(square**0.5, rel=1e-10)
    for way in ("dense", "gather"):
        assert results[way][1] == pytest.approx(norm, rel=1e-12)
        for name, value in end.items():
            torch.testing.assert_close(results[way][0][1][name], value, rtol=1e-12, atol=1e-12)


# -- going on ------------------------------------------------------------------------------------------------------


#: ranks, data, way, the rest of the plan
CHAIN: list[tuple[int, int, str, dict[str, Any]]] = [
    (3, 3, "owners", {}),
    (4, 1, "owners", dict(tensor=dict(mode="2d", size=4))),
    (2, 1, "dense", dict(tensor=2)),
    (2, 2, "gather", {}),
]


@pytest.mark.parametrize("rule", but(["momentum"], ["rowwise_adagrad", "momentum"]))
def test_a_chain_of_plans_is_one_run(rule: str, tmp_path: Path) -> None:
    """Each link trains a step and saves; the next one goes on from that under another plan."""
    path, runs = None, []
    links = CHAIN if rule == "momentum" else CHAIN[:2]
    for step, (world, data, way, plan) in enumerate(links):
        config = config_of(RULES[rule][0], data, way, plan=plan, checkpoint=dict(dir=str(tmp_path / str(step))))
        runs.append(run_ranks(world, link, config, path, step, with_context=False)[0])
        path = tmp_path / str(step) / f"step-{step + 1:08d}"
    expected = in_torch(rule, runs[0].weights[0], None, range(len(links)))
    joined = Run()
    joined.losses, joined.norms = [run.losses[0] for run in runs], [run.norms[0] for run in runs]
    joined.weights = [runs[0].weights[0], *(run.weights[1] for run in runs)]
    joined.state = runs[-1].state
    assert joined.state["0.words.weight"], "state of the tables went on"
    assert_same(joined, expected, rule)


def link(rank: int, config: dict[str, Any], path: Path | None, step: int) -> Run:
    engine = colossus.initialize(config, model=Words, loss_fn=loss_fn)
    if path is not None:
        engine.checkpoints.load(path)
    run = Run()
    run.weights.append(full_state_dict(engine.model, engine.context))
    result = engine.train_step(own_part(batch_of(step), engine))
    run.losses.append(result.loss)
    run.norms.append(result.grad_norm)
    run.weights.append(full_state_dict(engine.model, engine.context))
    run.state = gathered_state(engine)
    engine.checkpoints.save().wait()
    engine.close()
    return run
