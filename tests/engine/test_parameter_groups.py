"""``optimizer.groups`` and ``layer_decay``: what rules meet, what is refused, and runs that go on with other rules."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from helpers.ranks import run_ranks
from helpers.resumed import load, saved, settings
from helpers.tables import Words, own_part
from helpers.tables import batch_of as batch_of_words
from helpers.tables import loss_fn as words_loss
from torch import nn

import colossus
from colossus.config import Config, ConfigError, load_config
from colossus.construct.build_model import build
from colossus.context.parallel_context import ParallelContext
from colossus.engine.optimizers import require_options
from colossus.engine.parameter_groups import ParameterGroups, make_groups
from colossus.launch.checks import check_model
from colossus.registry import MODELS

GPT: dict[str, Any] = dict(type="GPT", num_layers=3, hidden_size=8, num_heads=2, vocab_size=11, seq_len=4)


def config_of(model: Any = GPT, **optimizer: Any) -> Config:
    return load_config(dict(model=model, data=dict(type="PythonStdlib"), optimizer=optimizer, device="cpu"))


def groups_of(model: Any = GPT, **optimizer: Any) -> tuple[ParameterGroups, nn.Module]:
    """Of a whole model on meta."""
    config = config_of(model, **optimizer)
    assert config.model is not None
    spec = config.model.spec()
    module = build(lambda: MODELS.build(spec), ParallelContext.from_config(config, connect=False), materialize=False)
    groups = make_groups(config.optimizer, module)
    assert groups is not None
    return groups, module


def test_a_parameter_takes_what_all_its_rules_say_the_last_of_each_key() -> None:
    groups, model = groups_of(
        weight_decay=0.1,
        groups=[
            dict(match=["*.bias", "*norm*"], weight_decay=0.0, lr_scale=0.5),
            dict(match="blocks.0.*", frozen=True),
            dict(match="blocks.0.mlp.*", frozen=False, lr_scale=2.0),
            dict(match=["*.query.weight", "*.key.weight", "*.value.weight"], betas=(0.8, 0.9)),
        ],
    )
    frozen = {name for name, param in model.named_parameters() if not param.requires_grad}
    assert frozen == {name for name, _ in model.named_parameters() if name.startswith("blocks.0.")} - {
        name for name, _ in model.named_parameters() if name.startswith("blocks.0.mlp.")
    }
    assert groups.group_of.keys() == {name for name, _ in model.named_parameters()} - frozen
    wanted = {
        "embedding.weight": dict(lr_scale=1.0),
        "norm.weight": dict(weight_decay=0.0, lr_scale=0.5),
        "blocks.0.mlp.up.bias": dict(weight_decay=0.0, lr_scale=2.0),
        "blocks.1.attention.qkv.weight": dict(betas=(0.8, 0.9), lr_scale=1.0),
    }
    for name, options in wanted.items():
        assert groups.options[groups.group_of[name]] == options


def beit_scale(name: str, decay: float) -> float:
    """``get_layer_id_for_vit`` and ``scale`` of BEiT's code, of 3 layers."""
    layer = 0 if name.startswith(("embedding", "positions")) else 4
    if name.startswith("blocks"):
        layer = int(name.split(".")[1]) + 1
    return decay ** (4 - layer)


def test_layers_have_the_learning_rates_of_beit() -> None:
    groups, model = groups_of(layer_decay=0.6, groups=[dict(match="*.bias", lr_scale=3.0)])
    for name, _ in model.named_parameters():
        scale = groups.options[groups.group_of[name]]["lr_scale"]
        assert scale == pytest.approx(beit_scale(name, 0.6) * (3.0 if name.endswith(".bias") else 1.0)), name
    lines = [line.split() for line in groups.description]
    assert lines[0][0] == "*.bias"
    assert lines[1][:2] == ["before", "blocks.0"]
    assert lines[-1][:2] == ["after", "blocks.2"]
    sizes = {name: param.numel() for name, param in model.named_parameters() if name.startswith("blocks.1.")}
    assert f"blocks.1 {len(sizes)} parameters {sum(sizes.values())} elements lr_scale = 0.36" in [
        " ".join(line) for line in lines
    ]


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no such name": (
        dict(groups=[dict(match=["*.bias", "embeding*"], lr_scale=0.1)]),
        "optimizer.groups.0.match: 'embeding*' matches no parameter; names are like embedding.weight",
    ),
    "rows of one parameter": (
        dict(groups=[dict(match="*query*", lr_scale=0.1)]),
        "matches blocks.0.attention.qkv.query.weight, but not blocks.0.attention.qkv.key.weight, "
        "blocks.0.attention.qkv.value.weight: these are rows of one parameter",
    ),
    "no such option": (
        dict(groups=[dict(match="*", weight_decya=0.1)]),
        "optimizer.groups.0.weight_decya: no such key; did you mean optimizer.groups.0.weight_decay?",
    ),
    "a value": (
        dict(weight_decay=0.1, groups=[dict(match="*", weight_decay=-0.1)]),
        "optimizer.groups.0.weight_decay: must be at least 0, got -0.1",
    ),
    "lr": (dict(groups=[dict(match="*", lr=0.1)]), "optimizer.groups.0: lr: a rule has a factor of optimizer.lr"),
    "nothing": (dict(groups=[dict(match="*")]), "optimizer.groups.0: sets nothing for *"),
    "a value that the class refuses": (
        dict(type="Adadelta", groups=[dict(match="*.bias", rho=2.0)]),
        "optimizer.groups.0.rho: must be at most 1, got 2",
    ),
    "an option of one of our own": (
        dict(type="LARS", momentum=1.5),
        "optimizer.momentum: must be less than 1, got 1.5",
    ),
    "a type": (dict(type="Adafactor", eps=1e-8), "optimizer.eps: must be a tuple or a list, got 1e-08"),
    "a choice": (dict(type="Muon", dtype="fp8"), "optimizer.dtype: must be 'bf16', 'fp32' or 'fp64', got 'fp8'"),
    "whole twice": (dict(type="Muon", whole=True), "optimizer.whole: Muon computes with whole parameters by itself"),
    "all frozen": (dict(groups=[dict(match="*", frozen=True)]), "are frozen, so nothing would be trained"),
    "a class of torch": (dict(type="torch.optim:LBFGS"), "optimizer.type: LBFGS: it evaluates the loss several times"),
    "a path": (dict(type="torch.optim:AdamV"), "optimizer.type: 'torch.optim:AdamV': torch.optim has no 'AdamV'; did"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_wrong_is_told_before_a_process_is_started(case: str) -> None:
    section, words = REFUSED[case]
    with pytest.raises(ConfigError) as caught:
        check_model(config_of(**section))
    assert words in str(caught.value)
    assert str(caught.value).count(", got ") <= 1


def test_options_of_all_that_a_config_names_are_taken() -> None:
    for section in (
        dict(type="Muon", momentum=0.9, groups=[dict(match="*", muon=False)]),
        dict(type="LAMB", groups=[dict(match="*", adapt=False)]),
        dict(type="torch.optim:Adafactor", whole=True, beta2_decay=-0.7),
        dict(type="ASGD", alpha=0.7),
    ):
        config = config_of(**section)
        require_options(config.optimizer)


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 3), nn.Linear(3, 1)


def test_a_model_without_a_list_of_blocks_has_no_layers() -> None:
    with pytest.raises(ConfigError, match=r"layer_decay: Two has no list of blocks .*lr_scale=\.\."):
        groups_of(dict(type=Two), layer_decay=0.5)


# -- on ranks -------------------------------------------------------------------------------------------------


RULED = dict(
    lr=1e-2,
    groups=[dict(match=["*.bias", "norm*"], weight_decay=0.0), dict(match="down.*", lr_scale=0.5, betas=(0.8, 0.9))],
)


def rates(engine: Any) -> list[tuple[float, float, float]]:
    engine.train_step(next(engine.loader))
    return [(group["lr"], group["weight_decay"], group["betas"][0]) for group in engine.optimizer.param_groups]


def test_a_run_goes_on_with_its_groups_under_another_plan(tmp_path: Path) -> None:
    path = saved(tmp_path, world=2, parallel=dict(data=2, zero=3), optimizer=RULED)
    wanted = [(1e-2, 0.01, 0.9), (1e-2, 0.0, 0.9), (5e-3, 0.01, 0.8), (5e-3, 0.0, 0.8)]
    for groups, warnings, refused in load(
        path, settings(tmp_path / "two", dict(tensor=2), optimizer=RULED, train=dict(steps=4)), rates, world=2
    ):
        assert not refused
        assert not warnings
        assert groups == [pytest.approx(group) for group in wanted]
    one_rule = dict(lr=1e-2, groups=RULED["groups"][:1])  # type: ignore[index]
    other = dict(lr=1e-2, groups=[RULED["groups"][0], dict(match="down.*", lr_scale=0.25, betas=(0.8, 0.9))])  # type: ignore[index]
    for section, words in ((other, "lr was 0.005 and is 0.0025"), (one_rule, "4 groups of parameters, this run has 2")):
        ((_, (warning,), _),) = load(path, settings(tmp_path / "one", optimizer=section, train=dict(steps=4)), rates)
        assert words in warning


def words(rank: int) -> list[dict[str, Any]]:
    """Tables in groups of their own, with a stage that has none of them."""
    optimizer = dict(type="SGD", lr=0.1, groups=[dict(match="0.words.*", lr_scale=0.5), dict(match="1.*", frozen=True)])
    config = dict(
        parallel=dict(pipeline=2), optimizer=optimizer | dict(tables=dict(type="Adagrad", lr=0.2)),
        train=dict(global_batch_size=8, precision="fp64", steps=4), schedule=dict(microbatches=2), device="cpu",
    )  # fmt: skip
    engine = colossus.initialize(config, model=Words, loss_fn=words_loss)
    engine.train_step(own_part(batch_of_words(0), engine))
    lines = [
        {key: value for key, value in group.items() if key in ("name", "lr", "row_rule")} | {"n": len(group["params"])}
        for group in engine.optimizer.param_groups
    ]
    engine.close()
    return lines


def test_tables_and_frozen_parameters_of_a_pipeline() -> None:
    first, second = run_ranks(2, words, with_context=False)
    options_of_groups = [(group.get("name"), group.get("row_rule"), group["lr"], group["n"]) for group in first]
    assert options_of_groups == [
        (None, None, pytest.approx(0.05), 0),
        (None, None, pytest.approx(0.1), 0),
        ("tables", "adagrad", pytest.approx(0.1), 1),
        ("tables", "adagrad", pytest.approx(0.2), 4),
    ]
    assert [group["lr"] for group in second] == [pytest.approx(group["lr"]) for group in first]
    assert sum(group["n"] for group in second) == 4
