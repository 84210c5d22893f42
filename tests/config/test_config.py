"""The config file: what it may hold, how it is overridden, which plans fit, and every error in words."""

# configs are written with dict(...), and so are the tests of them

from __future__ import annotations

import copy
import inspect
import json
import math
import pickle
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from helpers.drawn import examples
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from colossus.config import ConfigError, as_dict, as_source, load_config
from colossus.config.components import describe
from colossus.config.overrides import apply_overrides, parse_override
from colossus.config.plans import world_size
from colossus.config.printed import all_keys, key_help
from colossus.registry import (
    DATASETS,
    GRAPHS,
    HOOKS,
    LR_SCHEDULES,
    MODELS,
    OPTIMIZERS,
    SCHEDULES,
    STRATEGIES,
    Registry,
)

GPT = dict(type="GPT", num_layers=4, hidden_size=128, num_heads=8)


@pytest.fixture(autouse=True)
def clean_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))


class Net:
    def __init__(self, width: int = 3) -> None: ...


def write(folder: Path, text: str, name: str = "config.py") -> Path:
    path = folder / name
    path.write_text(textwrap.dedent(text))
    return path


def problems(config: Any, overrides: list[str] | tuple[str, ...] = (), nproc: int | None = None) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(config, overrides, nproc)
    return caught.value.problems


# What a file may hold


def test_empty_config_is_one_process() -> None:
    config = load_config({})
    assert (config.name, config.parallel.data, config.model, config.data, config.hooks) == ("run", 1, None, None, ())
    assert config.parallel.tensor.mode == "1d"
    assert config.parallel.rank_order == ("pipeline", "data", "sequence", "tensor")
    assert config.train.schedule_steps == config.train.steps == 100
    assert config.parallel.strategy.type == "all_reduce"
    assert (config.optimizer.type, config.optimizer.arguments) == ("AdamW", dict(lr=3e-4))


def test_short_forms() -> None:
    config = load_config(dict(parallel=dict(tensor=4, sequence=2), model="GPT", data="PythonStdlib", optimizer="SGD"))
    assert (config.parallel.tensor.size, config.parallel.sequence.size) == (4, 2)
    assert config.model is not None
    assert (config.model.type, config.data.type, config.optimizer.type) == ("GPT", "PythonStdlib", "SGD")
    for split, read in (("parameters", "parameters"), ([4, 2], (4, 2))):
        assert load_config(dict(parallel=dict(pipeline=dict(size=2, split=split)))).parallel.pipeline.split == read
    tensor = load_config(dict(parallel=dict(tensor=dict(mode="2d", shape=[2, 3])))).parallel.tensor
    assert (tensor.mode, tensor.size, tensor.shape) == ("2d", 6, (2, 3))
    for schedule, length in (({}, 7), (dict(schedule_steps=9), 9)):
        assert load_config(dict(train=dict(steps=7, **schedule))).train.schedule_steps == length


def test_components_objects_and_callables() -> None:
    samples, hooks, optimizer = [1, 2, 3], [print, dict(type=Net, width=1)], dict(weight_decay=0.1)
    config = load_config(dict(model=dict(type=Net, width=5), data=samples, hooks=hooks, optimizer=optimizer))
    assert config.model is not None
    assert config.model.spec() == dict(type=Net, width=5)
    assert config.data is samples
    assert config.hooks[0] is print
    assert config.hooks[1].spec() == dict(type=Net, width=1)
    assert config.optimizer.arguments == dict(lr=3e-4, weight_decay=0.1)


# Wrong keys and values


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (
            dict(train=dict(global_batchsize=8)),
            "train.global_batchsize: no such key; did you mean train.global_batch_size? known keys of train: steps, "
            "schedule_steps, global_batch_size, precision, loss_scale, activation_checkpoint, clip_grad_norm, ",
        ),
        (
            dict(parallel=dict(tensor=dict(sise=2))),
            "parallel.tensor.sise: no such key; did you mean parallel.tensor.size? known keys of parallel.tensor: "
            "size, mode, depth, shape, sequence_sharded",
        ),
        (dict(train=dict(microbatches=8)), "train.microbatches: no such key; did you mean schedule.microbatches?"),
        (dict(zzzzz=3), "zzzzz: no such key; known keys: name"),
        (dict(train=dict(steps=True)), "train.steps: must be a whole number, got True"),
        (dict(train=dict(clip_grad_norm=0)), "train.clip_grad_norm: must be greater than 0, got 0"),
        (
            dict(train=dict(precision=dict(compute="fp64"))),
            "train.precision: params = 'fp32', compute = 'fp64', reduce = 'fp32', optimizer = 'fp32': fp64 is for all",
        ),
        (
            dict(train=dict(precision=dict(params="bf16", optimizer="fp16"))),
            "train.precision: params = 'bf16', compute = 'bf16', reduce = 'fp32', optimizer = 'fp16': the optimizer",
        ),
        (
            dict(train=dict(precision=dict(compute="bf16", reduce="fp16"))),
            "train.precision: params = 'fp32', compute = 'bf16', reduce = 'fp16', optimizer = 'fp32': sums of",
        ),
        (dict(train=dict(loss_scale=dict(init=8))), "train: loss_scale is for fp16, whose gradients would vanish, but"),
        (dict(parallel=dict(zero=dict(shard=2))), "parallel.zero: shard: no effect without a stage"),
        (dict(optimizer=dict(lr=math.inf)), "optimizer.lr: must be a finite number, got inf"),
        (
            dict(parallel=dict(zero=1, strategy="all_reduce")),
            "parallel: zero = 1 and strategy = 'all_reduce' both define what data ranks do: set one of them",
        ),
        (
            dict(parallel=dict(pipeline=dict(size=2, split=[0, 3]))),
            "parallel.pipeline.split: must be 'parameters', 'time' or the number of blocks of each stage",
        ),
        (dict(model=dict(type=3)), "model.type: must be a registered name or a callable, got 3"),
        (dict(data=dict(path=3)), 'data: needs a type: dict(type="...", **options), or an object'),
        (dict(data=json), "data: must be dict(type=..., **options), an object or a callable, got <module"),
        (dict(hooks=print), "hooks: must be a tuple or a list, got <built-in function print>"),
    ],
)
def test_wrong_keys_and_values(config: dict[str, Any], words: str) -> None:
    (problem,) = problems(config)
    assert problem.startswith(words)


def test_the_help_of_a_key_is_read_off_the_schema() -> None:
    config = load_config(dict(model=GPT, parallel=dict(strategy="sgp")))
    assert key_help("train.clip_grad_norm", config) == (
        "train.clip_grad_norm: number above 0 or None, by default None: largest norm of the gradient of the mean loss; "
        "None: no clipping"
    )
    assert "\nparallel.tensor.mode: text, by default '1d'" in key_help("parallel.tensor", config)
    assert key_help("model.seq_len", config).startswith("model.seq_len: whole number at least 1, by default 128: ")
    assert "parallel.strategy.overlap: " in key_help("parallel.strategy", config)
    with pytest.raises(ConfigError, match=r"^train\.step: no such key; did you mean train\.steps\?"):
        key_help("train.step", config)
    assert [key for key, _, comment in all_keys() if not comment] == []


def test_every_problem_is_told_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(dict(train=dict(sed=1, steps=3), devise="cpu"), ["train.steps=0"])
    assert caught.value.problems[0] == "train.steps: must be at least 1, got 0"
    assert str(caught.value).startswith("3 problems\n  train.steps")


def test_names_and_options_are_looked_up() -> None:
    (problem,) = problems(dict(optimizer="AdamV"))
    assert problem.startswith("optimizer.type: no optimizer named 'AdamV'. Did you mean 'Adam'? Known: A")
    (problem,) = problems(dict(parallel=dict(tensor=dict(mode="4d"))))
    assert problem.startswith("parallel.tensor.mode: no tensor mode named '4d'. Did you mean")
    (problem,) = problems(dict(model=dict(type=Net, widht=3)))
    assert problem == "model.widht: no such key; did you mean model.width? known keys of model: type, width"
    (problem,) = problems(dict(optimizer=dict(type="Muon", betas=(0.9, 0.95))))
    assert "known keys of optimizer: type, lr, groups, layer_decay, whole, tables, weight_decay, momentum," in problem


@pytest.mark.parametrize("registry", [MODELS, DATASETS, OPTIMIZERS, STRATEGIES, HOOKS, SCHEDULES, LR_SCHEDULES, GRAPHS])
def test_options_of_a_builtin_are_the_arguments_that_it_has(registry: Registry) -> None:
    """With the defaults of torch's and our optimizers; classes with ``**options`` are made with the description."""
    for name in registry.names():
        described, entry = describe(name, registry), registry.get(name)
        assert described is not None, name
        arguments = inspect.signature(entry).parameters
        own = {key: parameter for key, parameter in arguments.items() if key not in registry.passed}
        if any(parameter.kind is parameter.VAR_KEYWORD for parameter in own.values()):
            continue
        assert described.model_fields.keys() == own.keys(), name
        for key, field in described.model_fields.items():
            if registry is OPTIMIZERS:
                assert field.default == own[key].default, (name, key)


def test_descriptions_need_no_torch() -> None:
    code = """
        import sys
        from colossus import registry
        from colossus.config.components import describe
        for table in (registry.MODELS, registry.DATASETS, registry.OPTIMIZERS, registry.TABLE_OPTIMIZERS,
                      registry.STRATEGIES, registry.HOOKS, registry.SCHEDULES, registry.LR_SCHEDULES, registry.GRAPHS):
            for name in table.names():
                describe(name, table)
        sys.exit("torch" in sys.modules)
    """
    assert subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=False).returncode == 0


# The file


def test_a_file_with_a_class_of_its_own_and_another_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Annotations are values, as the file has no ``from __future__`` of its own; a byte-order mark is none of it."""
    monkeypatch.setattr(MODELS, "_entries", dict(MODELS._entries))
    base = "from __future__ import annotations\nwidth = 7\ntrain = dict(steps=3, seed=5)\n"
    write(tmp_path, base, "base_for_test.py")
    text = """
        from base_for_test import *
        from colossus.registry import MODELS

        _rows = 2

        @MODELS.register("mine")
        class Mine:
            height: int = 1
            def __init__(self, width=1): ...

        def helper():
            return width

        model = dict(type="mine", width=helper())
        train = {**train, "steps": _rows if Mine.__annotations__["height"] is int else 0}
    """
    path = write(tmp_path, text, "my-run.py")
    path.write_text("\ufeff" + path.read_text())
    config = load_config(path)
    assert config.model is not None
    assert (config.name, config.source) == ("my-run", "my-run.py")
    assert (config.model.options, config.train.steps, config.train.seed) == (dict(width=7), 2, 5)
    assert pickle.loads(pickle.dumps(MODELS.get("mine"))) is MODELS.get("mine")
    load_config(path)  # a second run registers the same class again


def test_unknown_names_of_the_file(tmp_path: Path) -> None:
    (problem,) = problems(write(tmp_path, "scheduel = dict(type='1f1b')\n"))
    assert problem.startswith("scheduel: no such key; did you mean schedule? known keys: name,")
    assert problem.endswith("(start the names of helpers with an underscore: _scheduel)")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("train = dict(steps=3\n", "config.py: line 1: SyntaxError: '(' was never closed"),
        ("\n\ntrain = dict(steps=stepz)\n", "config.py: line 3: NameError: name 'stepz' is not defined"),
        ("x\x00", "config.py: SyntaxError: source code string cannot contain null bytes"),
        ("\nimport json\njson.loads('{')\n", "config.py: line 3: JSONDecodeError: Expecting property name"),
    ],
)
def test_files_that_do_not_run(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(write(tmp_path, text))
    message = str(caught.value).replace("ValueError: source", "SyntaxError: source")  # differs between Python versions
    assert message.startswith(words)
    assert ("(raised in decoder.py, line" in message) == ("json" in text)
    assert caught.value.__cause__ is not None


def test_missing_files(tmp_path: Path) -> None:
    write(tmp_path, "", "configs.py")
    for path, words in {
        tmp_path / "config.py": f"no such file: {tmp_path}/config.py; did you mean configs.py?",
        tmp_path / "no" / "config.py": f"no such file: {tmp_path}/no/config.py",
        tmp_path / "no" / "gpt_stdlib.py": f"no such file: {tmp_path}/no/gpt_stdlib.py; `colossus new DIR --from "
        "gpt_stdlib` writes this config of the package into a folder",
        tmp_path: "cannot be read: ",
        "train.steps=3": "the config file comes first, overrides (section.key=value) after it",
    }.items():
        (problem,) = problems(path)
        assert problem.startswith(words)


# Overrides


@pytest.mark.parametrize(
    ("override", "path", "value"),
    [
        ("optimizer.lr=1e-3", ["optimizer", "lr"], 1e-3),
        ("parallel.tensor.mode=2.5d", ["parallel", "tensor", "mode"], "2.5d"),
        ("checkpoint.dir=a=b", ["checkpoint", "dir"], "a=b"),
        ("data.path=", ["data", "path"], ""),
        ("a=dict(size=f())", ["a"], "dict(size=f())"),
    ],
)
def test_parse_override(override: str, path: list[str], value: Any) -> None:
    assert parse_override(override) == (path, value)


@given(
    st.lists(st.from_regex(r"[a-z_][a-z0-9_]{0,6}", fullmatch=True), min_size=1, max_size=4),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
        max_leaves=5,
    ),
)
def test_overrides_round_trip(path: list[str], value: Any) -> None:
    assert parse_override(f"{'.'.join(path)}={value!r}") == (path, value)


def test_later_overrides_win_and_the_file_is_not_changed() -> None:
    values = dict(train=dict(steps=3), optimizer=dict(type="AdamW", lr=1e-3))
    before = copy.deepcopy(values)
    out = apply_overrides(values, ["train.steps=7", "train.steps=9", "optimizer.lr=0.5"])
    assert out == dict(train=dict(steps=9), optimizer=dict(type="AdamW", lr=0.5))
    assert values == before


def test_overrides_of_short_forms() -> None:
    tensor = load_config(dict(parallel=dict(tensor=4)), ["parallel.tensor.mode=2d"]).parallel.tensor
    assert (tensor.size, tensor.mode) == (4, "2d")
    tensor = load_config(dict(parallel=dict(tensor=dict(mode="2d", size=9))), ["parallel.tensor=4"]).parallel.tensor
    assert (tensor.size, tensor.mode) == (4, "2d")
    tensor = load_config({}, ["parallel.tensor=4", "parallel.tensor.mode=1d"]).parallel.tensor
    assert (tensor.size, tensor.mode) == (4, "1d")
    assert load_config({}, ["optimizer=SGD", "optimizer.lr=1"]).optimizer.arguments == dict(lr=1.0)
    assert load_config({}, ["data.type=TextFolder", "data.path=x"]).data.options == dict(path="x")


@pytest.mark.parametrize(
    ("config", "override", "words"),
    [
        ({}, "train.steps=many", "train.steps: must be a whole number, got 'many'"),
        ({}, "train.steps", "'train.steps' has no '=': an override is section.key=value, for example train.steps=50"),
        ({}, "train.steps.x=3", "train.steps: must be a whole number, got {'x': 3}"),
        (
            dict(model=Net),
            "model.width=3",
            "model.width: model is Net, which has no keys: write model = dict(.., width=..",
        ),
    ],
)
def test_wrong_overrides(config: dict[str, Any], override: str, words: str) -> None:
    (problem,) = problems(config, [override])
    assert problem.startswith(words)


# Plans


def test_arithmetic_of_a_plan_that_does_not_multiply() -> None:
    """The nearest plans, of these the one first whose lower bound of time is least."""
    (problem,) = problems(dict(parallel=dict(data=2, pipeline=2, tensor=4), model=GPT), nproc=8)
    assert problem.splitlines() == [
        "parallel: data 2 x pipeline 2 x tensor 4 = 16, but 8 processes",
        "  nearest plans that fit 8 processes:",
        "    parallel.data=4 parallel.tensor.size=1",
        "    parallel.tensor.size=2",
        "    parallel.data=1",
        "    parallel.pipeline.size=1",
        "  or keep the plan and start 16 processes (--nproc 16)",
    ]


@pytest.mark.parametrize(
    ("parallel", "nproc", "plans"),
    [
        (dict(data=4, strategy=dict(type="hierarchical", hosts=2)), 8, ["parallel.data=8 parallel.strategy.hosts=4"]),
        (dict(data=4, zero=dict(stage=1, shard=4)), 2, ["parallel.data=2 parallel.zero.shard=2"]),
        # two peers want more than two replicas
        (dict(data=8, strategy=dict(type="sgp", peers=2)), 4, ["parallel.data=4"]),
        (dict(data=3, strategy=dict(type="server", max_staleness=2)), 4, []),
        (dict(data=6, expert=4), 8, ["parallel.data=8"]),  # groups that did not fit six data ranks
    ],
)
def test_the_nearest_plans_are_those_that_the_strategy_allows(
    parallel: dict[str, Any], nproc: int, plans: list[str]
) -> None:
    (problem,) = problems(dict(parallel=parallel, model=GPT), nproc=nproc)
    lines = [line.strip() for line in problem.splitlines() if line.startswith("    ")]
    if plans:
        assert set(plans) <= set(lines)
        assert not any(line.startswith("parallel.data=2 parallel.tensor.size=2") for line in lines)
    else:
        assert "no plan of these axes fits 4 processes" in problem
        assert lines[0].startswith("parallel.strategy.max_staleness")


def test_data_is_derived() -> None:
    assert load_config(dict(parallel=dict(tensor=2)), nproc=8).parallel.data == 4
    assert load_config(dict(parallel=dict(tensor=2))).parallel.data == 1
    (problem,) = problems(dict(parallel=dict(pipeline=2, tensor=3)), nproc=8)
    assert problem.startswith("parallel: pipeline 2 x tensor 3 = 6 does not divide 8 processes\n")
    assert "parallel.data" not in problem
    (problem,) = problems({}, nproc=0)
    assert problem == "nproc = 0: the number of processes must be at least 1"


def test_batch() -> None:
    config = dict(parallel=dict(data=4), schedule=dict(microbatches=2), train=dict(global_batch_size=30))
    (problem,) = problems(config)
    assert problem.splitlines() == [
        "train.global_batch_size = 30 is not a multiple of data 4 x microbatches 2 = 8; nearest: 24 or 32",
        "  nearest plans that fit 4 processes:",
        "    parallel.data=1 parallel.tensor.size=4",
    ]
    (problem,) = problems({**config, "train": dict(global_batch_size=3)})
    assert problem.splitlines() == [
        "train.global_batch_size = 3 is not a multiple of data 4 x microbatches 2 = 8; nearest: 8",
        "  no plan of these axes fits 4 processes, this model and this batch",
    ]


@pytest.mark.parametrize(
    ("options", "parallel", "words"),
    [
        (
            {},
            dict(tensor=dict(mode="3d", size=9)),
            "parallel.tensor: 3d: parallel.tensor.size = 9 is not a cube",
        ),
        (
            {},
            dict(tensor=dict(mode="2d", size=4, shape=(2, 3))),
            "parallel.tensor: parallel.tensor.shape = (2, 3): mode 2d has 2 axes",
        ),
        (
            {},
            dict(tensor=dict(mode="2d", size=4, depth=2)),
            "parallel.tensor.depth = 2 has no effect in mode 2d;",
        ),
        (dict(hidden_size=100), {}, "model.hidden_size = 100 is not a multiple of model.num_heads = 8; near"),
        (
            dict(hidden_size=102, num_heads=6),
            dict(tensor=dict(mode="2d", shape=(4, 2))),
            "model.hidden_size = 102 is not a multiple of the 4 ranks of row (parallel.tensor.mode = 2d);",
        ),
        (
            dict(hidden_size=24, num_heads=3, num_kv_heads=1, ffn_hidden_size=96),
            dict(tensor=dict(mode="3d", shape=(3, 1, 4))),
            "train.global_batch_size = 32 is not a multiple of data 1 x microbatches 1 x 12",
        ),
        ({}, dict(pipeline=8), "model.num_layers = 4 gives 6 blocks (layers and both ends), fewer than"),
    ],
)
def test_what_does_not_divide(options: dict[str, Any], parallel: dict[str, Any], words: str) -> None:
    (problem,) = problems(dict(model={**GPT, **options}, parallel=parallel))
    assert problem.startswith(words)
    assert "nearest plans" in problem or "no plan" in problem


def test_wrong_model_options() -> None:
    lines = problems(dict(model={**GPT, "mlp": "relu", "dropout": 1.0, "num_layer": 3, "num_heads": 0}))
    keys = ["model.num_heads", "model.mlp", "model.dropout", "model.num_layer"]
    assert [line.partition(":")[0] for line in lines] == keys
    assert "did you mean model.num_layers?" in lines[-1]


def test_options_class_of_a_user(monkeypatch: pytest.MonkeyPatch) -> None:
    class Options:
        def __init__(self, width: int = 1) -> None:
            self.width = width

        def check(self, parallel: Any) -> list[str]:
            return [] if self.width % parallel.tensor.size == 0 else [f"model.width = {self.width} is odd"]

    monkeypatch.setitem(MODELS._entries, "theirs", Net)
    monkeypatch.setitem(MODELS._options, "theirs", Options)
    load_config(dict(model=dict(type="theirs", width=4), parallel=dict(tensor=2)))
    (problem,) = problems(dict(model=dict(type="theirs", width=3), parallel=dict(tensor=2)))
    assert problem.startswith("model.width = 3 is odd\n")
    (problem,) = problems(dict(model=dict(type="theirs", depth=3)))
    assert problem.startswith("model: ")
    assert "'depth'" in problem


sizes = st.integers(1, 6)


@st.composite
def plans(draw: st.DrawFn) -> dict[str, Any]:
    mode = draw(st.sampled_from(["1d", "2d", "2.5d", "3d"]))
    sequence = draw(st.sampled_from([1, 2, dict(size=4, mode="hybrid", ulysses=2)]))
    parallel: dict[str, Any] = dict(
        pipeline=draw(st.integers(1, 3)), sequence=sequence, tensor=dict(mode=mode, size=draw(sizes))
    )
    if draw(st.booleans()):
        parallel["data"] = draw(sizes)
    return parallel


@given(plans(), st.integers(1, 48), st.sampled_from([4, 6, 12, 32]), st.integers(1, 3))
@settings(max_examples=examples(100))
def test_a_plan_fits_or_its_suggestions_do(parallel: dict[str, Any], nproc: int, batch: int, microbatches: int) -> None:
    config = dict(
        parallel=parallel,
        model={**GPT, "hidden_size": 144, "num_heads": 12},
        train=dict(global_batch_size=batch),
        schedule=dict(type="1f1b", microbatches=microbatches),
    )
    try:
        loaded = load_config(config, nproc=nproc)
    except ConfigError as error:
        lines = [line.strip() for line in str(error).splitlines()]
        suggestions = [line for line in lines if line.startswith("parallel.") and "=" in line.split()[0]]
        suggestions = [line for line in suggestions if " = " not in line]
        assert len(suggestions) <= 4
        assert suggestions or any(line.startswith("no plan of these axes fits") for line in lines)
        for suggestion in suggestions:
            assert world_size(load_config(config, suggestion.split(), nproc).parallel) == nproc
    else:
        data = loaded.parallel.data
        assert world_size(loaded.parallel) == nproc
        assert data == parallel.get("data", data)
        assert batch % (data * microbatches) == 0  # type: ignore[operator]


# The resolved config


def test_as_dict_is_json() -> None:
    config = load_config(dict(model=Net, data=iter([]), hooks=[print, dict(type=Net, width=Path("a"))]))
    data = json.loads(json.dumps(as_dict(config)))
    assert data["model"] == dict(type=f"{__name__}:Net")
    assert data["data"] == "<builtins:list_iterator>"
    assert data["hooks"] == ["builtins:print", dict(type=f"{__name__}:Net", width="a")]
    assert data["parallel"]["data"] == 1


options = st.dictionaries(st.text("abc ", min_size=1) | st.just("if"), st.text() | st.lists(st.integers()) | st.none())


@given(plans(), st.integers(0, 99), st.none() | st.floats(0.1, 9), options)
def test_the_printed_config_loads_to_the_same(
    parallel: dict[str, Any], seed: int, clip: float | None, options: dict[str, Any]
) -> None:
    values = dict(
        parallel=parallel,
        model=GPT,
        train=dict(seed=seed, clip_grad_norm=clip, global_batch_size=60),
        optimizer=dict(type="free", **options),
    )
    with mock.patch.dict(OPTIMIZERS._entries, free=lambda parameters, **rest: None):
        try:
            config = load_config(values)
        except ConfigError:
            assume(False)
        namespace: dict[str, Any] = {}
        exec(as_source(config), namespace)
        del namespace["__builtins__"]
        again = load_config(namespace)
    assert as_dict(again) == as_dict(config)
    assert again.optimizer.options == options


def test_config_error_can_be_sent_between_processes() -> None:
    error = ConfigError(["a: b", "c: d"], "config.py")
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.problems, again.source) == (str(error), error.problems, "config.py")


# Options of components


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (dict(optimizer=dict(fused=1)), "optimizer.fused: must be True or False, got 1"),
        (dict(optimizer=dict(type="SGD", momentum=math.nan)), "optimizer.momentum: must be a finite number"),
        (dict(optimizer=dict(type="SGD", nesterov=True)), "optimizer.nesterov: needs a momentum above 0"),
        (dict(optimizer=dict(tables=dict(type="Adagrad", epps=1))), "optimizer.tables.epps: no such key; did you mean"),
        (
            dict(optimizer=dict(tables=dict(type="SparseAdam", amsgrad=True))),
            "optimizer.tables.amsgrad: must be False: there is no form of amsgrad for rows, got True",
        ),
    ],
)
def test_wrong_options_of_components(config: dict[str, Any], words: str) -> None:
    (problem,) = problems(config)
    assert problem.startswith(words)


def test_an_override_may_be_a_dict_as_in_config_files() -> None:
    assert load_config({}, ["parallel.tensor=dict(size=4, mode='2d')"]).parallel.tensor.mode == "2d"
    config = load_config({}, ["optimizer=dict(type='SGD', lr=0.5)", "hooks=[dict(type='TensorBoard')]"])
    assert (config.optimizer.type, config.optimizer.lr, config.hooks[0].type) == ("SGD", 0.5, "TensorBoard")
