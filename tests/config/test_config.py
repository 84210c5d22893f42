"""The config file: what it may hold, how it is overridden, which plans fit, and every error in words."""

# configs are written with dict(...), and so are the tests of them

from __future__ import annotations

import copy
import json
import math
import pickle
import sys
import textwrap
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from helpers.drawn import examples
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from colossus.config import ConfigError, as_dict, as_source, load_config
from colossus.config.components import parameters
from colossus.config.key_help import all_keys, key_help
from colossus.config.overrides import apply_overrides, parse_override
from colossus.config.sizes import nearest_plans, world_size
from colossus.registry import MODEL_OPTIONS, MODELS, OPTIMIZERS

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
    assert config.optimizer.spec() == dict(type="AdamW", lr=3e-4)


def test_short_forms() -> None:
    config = load_config(dict(parallel=dict(tensor=4, sequence=2), model="GPT", data="PythonStdlib", optimizer="SGD"))
    assert (config.parallel.tensor.size, config.parallel.sequence.size) == (4, 2)
    assert config.model is not None
    assert (config.model.type, config.data.type, config.optimizer.type) == ("GPT", "PythonStdlib", "SGD")
    for split, read in (("parameters", "parameters"), ([4, 2], (4, 2))):
        assert load_config(dict(parallel=dict(pipeline=dict(size=2, split=split)))).parallel.pipeline.split == read
    tensor = load_config(dict(parallel=dict(tensor=dict(mode="2d", shape=[2, 3])))).parallel.tensor
    assert (tensor.mode, tensor.size, tensor.shape) == ("2d", 6, (2, 3))
    for schedule, length in (({}, 7), (dict(schedule_steps=None), 7), (dict(schedule_steps=9), 9)):
        assert load_config(dict(train=dict(steps=7, **schedule))).train.schedule_steps == length


def test_components_objects_and_callables() -> None:
    samples = [1, 2, 3]
    config = load_config(
        dict(
            model=dict(type=Net, width=5),
            data=samples,
            hooks=[print, dict(type=Net, width=1)],
            optimizer=dict(type="AdamW", lr=1, weight_decay=0.1),
        )
    )
    assert config.model is not None
    assert config.model.spec() == dict(type=Net, width=5)
    assert config.data is samples
    assert config.hooks[0] is print
    assert config.hooks[1].spec() == dict(type=Net, width=1)
    assert config.optimizer.options == dict(weight_decay=0.1)
    assert config.optimizer.spec() == dict(type="AdamW", lr=1.0, weight_decay=0.1)


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
        (dict(paralel={}), "paralel: no such key; did you mean parallel? known keys: name, parallel, model"),
        (dict(zzzzz=3), "zzzzz: no such key; known keys: name"),
        (dict(train=dict(steps=1.5)), "train.steps: must be a whole number, got 1.5"),
        (dict(train=dict(steps=True)), "train.steps: must be a whole number, got True"),
        (dict(train=dict(steps=0)), "train.steps: must be at least 1, got 0"),
        (dict(train=dict(clip_grad_norm=0)), "train.clip_grad_norm: must be greater than 0, got 0"),
        (dict(train=dict(precision="bf8")), "train.precision: must be one of fp32, fp64, bf16, fp16, or dict(params="),
        (
            dict(train=dict(precision="fp16", loss_scale=dict(init=1e40))),
            "train.loss_scale.init: must be at most 1.84467e+19, got 1e+40",
        ),
        (dict(train=dict(loss_scale=dict(init=8))), "train: loss_scale is for fp16, whose gradients would vanish, but"),
        (dict(parallel=dict(zero=dict(shard=2))), "parallel.zero: shard: nothing without a stage"),
        (dict(train=5), "train: must be a section, dict(...), got 5"),
        (dict(optimizer=dict(lr=math.inf)), "optimizer.lr: must be a finite number, got inf"),
        (dict(lr_schedule=dict(min_ratio=2)), "lr_schedule.min_ratio: must be at most 1, got 2"),
        (dict(comm=dict(accounting=1)), "comm.accounting: must be True or False, got 1"),
        (
            dict(parallel=dict(zero=1, strategy="all_reduce")),
            "parallel: zero = 1 and strategy = 'all_reduce' both say what data ranks do: give one of them",
        ),
        (dict(parallel=dict(tensor=dict(mode=2))), "parallel.tensor.mode: must be a string (in quotes), got 2"),
        (dict(parallel=dict(tensor=dict(shape=4))), "parallel.tensor.shape: must be a tuple or a list, got 4"),
        (
            dict(parallel=dict(rank_order=("data", "tensor"))),
            "parallel.rank_order: must name each of pipeline, data, sequence, tensor once, outermost first, got data",
        ),
        (dict(model=dict(type=3)), "model.type: must be a registered name or a callable, got 3"),
        (dict(model=3), "model: must be a section, dict(...), got 3"),
        (dict(data=dict(path=3)), 'data: needs a type: dict(type="...", **options), or an object'),
        (dict(data=dict(type=3)), "data: must be a registered name or a callable, got 3"),
        (dict(data=json), "data: must be dict(type=..., **options), a dataset object or a callable, got <module"),
        (dict(hooks=[{}]), 'hooks.0: needs a type: dict(type="...", **options), or an object'),
        (dict(hooks=print), "hooks: must be a tuple or a list, got <built-in function print>"),
    ],
)
def test_wrong_keys_and_values(config: dict[str, Any], words: str) -> None:
    (found,) = problems(config)
    assert found.startswith(words)


@pytest.mark.parametrize(
    ("precision", "why"),
    [
        (dict(compute="fp64"), "compute = 'fp64', reduce = 'fp32', optimizer = 'fp32': fp64 is for all four or none"),
        (dict(params="bf16", optimizer="fp16"), ": the optimizer is of the dtype of params, or of fp32 where that is"),
        (dict(params="fp16", optimizer="fp16"), ": the numbers of an optimizer vanish in fp16; take fp32, or bf16"),
        (dict(compute="bf16", reduce="fp16"), ": sums of gradients fit into fp16 only where the loss is scaled"),
    ],
)
def test_dtypes_that_do_not_fit(precision: dict[str, str], why: str) -> None:
    (found,) = problems(dict(train=dict(precision=precision)))
    assert found.startswith("train.precision: params = ")
    assert why in found


def test_the_help_of_a_key_is_read_off_the_schema() -> None:
    config = load_config(dict(model=GPT, parallel=dict(strategy="sgp")))
    assert key_help("train.clip_grad_norm", config) == (
        "train.clip_grad_norm: number above 0 or None, by default None: largest norm of the gradient of the mean loss; "
        "None does not clip"
    )
    assert "\nparallel.tensor.mode: text, by default '1d'" in key_help("parallel.tensor", config)
    assert key_help("model.seq_len", config).startswith("model.seq_len: whole number at least 1, by default 128: ")
    assert "parallel.strategy.overlap: " in key_help("parallel.strategy", config)
    with pytest.raises(ConfigError, match=r"^train\.step: no such key; did you mean train\.steps\?"):
        key_help("train.step", config)
    assert [key for key, _, comment in all_keys() if not comment] == []


def test_every_problem_is_told_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(dict(train=dict(sed=1, steps=0), devise="cpu"))
    assert len(caught.value.problems) == 3
    text = str(caught.value)
    assert text.startswith("3 problems\n  ")
    assert "pydantic" not in text
    assert "input_value" not in text


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (dict(data="PythonStdLb"), "data.type: no dataset named 'PythonStdLb'. Did you mean 'PythonStdlib'?"),
        (dict(optimizer="AdamV"), "optimizer.type: no optimizer named 'AdamV'. Did you mean 'Adam'? Known: Adagrad, A"),
        (dict(lr_schedule="cosin"), "lr_schedule.type: no learning-rate schedule named 'cosin'. Did you mean 'cosine'"),
        (dict(parallel=dict(strategy="allreduce")), "parallel.strategy.type: no data-parallel strategy named 'allred"),
        (dict(parallel=dict(tensor=dict(mode="4d"))), "parallel.tensor.mode: no tensor mode named '4d'. Did you mean"),
    ],
)
def test_names_are_looked_up(config: dict[str, Any], words: str) -> None:
    (found,) = problems(config)
    assert found.startswith(words)


def test_options_of_a_callable_are_checked() -> None:
    (found,) = problems(dict(model=dict(type=Net, widht=3)))
    assert found == "model.widht: no such key; did you mean model.width? known keys of model: type, width"


def test_options_of_a_builtin_are_read_from_its_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = """
        raise RuntimeError("this module must not be imported")
        def open_options(a, **rest): ...
        def make(parameters, *, lr=1.0, momentum=0.0): ...
        class Plain: ...
        class Made:
            def __init__(self, path, size=3): ...
    """
    write(tmp_path, code, "parts_for_test.py")
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("open_options", "make", "Plain", "Made", "absent"):
        monkeypatch.setitem(OPTIMIZERS._builtin, name, f"parts_for_test:{name}")
    monkeypatch.setitem(OPTIMIZERS._builtin, "nowhere", "no.such.module:x")
    assert parameters("make", OPTIMIZERS) == ["parameters", "lr", "momentum"]
    assert parameters("Made", OPTIMIZERS) == ["path", "size"]
    for name in ("open_options", "Plain", "absent", "nowhere"):
        assert parameters(name, OPTIMIZERS) is None
    (found,) = problems(dict(optimizer=dict(type="make", momentun=0.9)))
    assert found.startswith("optimizer.momentun: no such key; did you mean optimizer.momentum?")


# The file


def test_file_with_its_own_module_and_registered_class(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MODELS, "_entries", dict(MODELS._entries))
    write(tmp_path, "WIDTH = 7\n", "widths_for_test.py")
    text = """
        from __future__ import annotations
        import math
        from typing import TYPE_CHECKING
        import widths_for_test
        from widths_for_test import WIDTH
        from colossus.registry import MODELS

        _rows = 2

        @MODELS.register("mine")
        class Mine:
            def __init__(self, width=1): ...

        def helper():
            return WIDTH

        model = dict(type="mine", width=helper())
        train = dict(steps=_rows)
    """
    path = write(tmp_path, text, "my-run.py")
    config = load_config(path)
    assert config.model is not None
    assert (config.name, config.source) == ("my-run", "my-run.py")
    assert config.model.options == dict(width=7)
    assert config.train.steps == 2
    assert pickle.loads(pickle.dumps(MODELS.get("mine"))) is MODELS.get("mine")
    load_config(path)  # a second run registers the same class again


def test_a_file_may_build_on_another(tmp_path: Path) -> None:
    base = """
        from __future__ import annotations
        width = 64
        train = dict(steps=3, seed=5)
    """
    write(tmp_path, base, "base_for_test.py")
    config = load_config(write(tmp_path, "from base_for_test import *\ntrain = {**train, 'steps': width}\n"))
    assert (config.train.steps, config.train.seed) == (64, 5)


def test_unknown_names_of_the_file(tmp_path: Path) -> None:
    (found,) = problems(write(tmp_path, "scheduel = dict(type='1f1b')\n"))
    assert found.startswith("scheduel: no such key; did you mean schedule? known keys: name,")
    assert found.endswith("(start the names of helpers with an underscore: _scheduel)")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("train = dict(steps=3\n", "config.py: line 1: SyntaxError: '(' was never closed"),
        ("\n\ntrain = dict(steps=stepz)\n", "config.py: line 3: NameError: name 'stepz' is not defined"),
        ("x\x00", "config.py: SyntaxError: source code string cannot contain null bytes"),
        ("import nowhere_at_all\n", "config.py: line 1: ModuleNotFoundError: No module named 'nowhere_at_all'"),
        ("\nraise SystemExit(0)\n", "config.py: line 2: SystemExit: the file called exit()"),
        ("def f():\n    return 1 / 0\ntrain = f()\n", "config.py: line 2: ZeroDivisionError: division by zero"),
        ("\nimport json\njson.loads('{')\n", "config.py: line 3: JSONDecodeError: Expecting property name"),
        ("assert 0\n", "config.py: line 1: AssertionError: no message"),
    ],
)
def test_files_that_do_not_run(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(write(tmp_path, text))
    shown = str(caught.value).replace("ValueError: source", "SyntaxError: source")  # differs between Python versions
    assert shown.startswith(words)
    assert ("(raised in decoder.py, line" in shown) == ("json" in text)
    assert caught.value.__cause__ is not None


def test_missing_files(tmp_path: Path) -> None:
    for name in ("configs.py", "other.py"):
        write(tmp_path, "", name)
    binary = tmp_path / "binary.txt"
    binary.write_bytes(b"\xff\xfe\xfd")
    for path, words in {
        tmp_path / "config.py": f"no such file: {tmp_path}/config.py; did you mean configs.py?",
        tmp_path / "zz.py": f"no such file: {tmp_path}/zz.py; Python files in {tmp_path}: configs.py, other.py",
        tmp_path / "no" / "config.py": f"no such file: {tmp_path}/no/config.py; there is no folder {tmp_path}/no",
        tmp_path: "is a folder, not a config file",
        "train.steps=3": "the config file comes first, overrides (section.key=value) after it",
        binary: "cannot be read: ",
    }.items():
        (found,) = problems(path)
        assert found.startswith(words)


# Overrides


@pytest.mark.parametrize(
    ("override", "path", "value"),
    [
        ("train.steps=50", ["train", "steps"], 50),
        ("optimizer.lr=1e-3", ["optimizer", "lr"], 1e-3),
        ("parallel.tensor.mode=2.5d", ["parallel", "tensor", "mode"], "2.5d"),
        ("checkpoint.dir=a=b", ["checkpoint", "dir"], "a=b"),
        ("train.clip_grad_norm=None", ["train", "clip_grad_norm"], None),
        ("parallel.tensor.shape=(2, 3)", ["parallel", "tensor", "shape"], (2, 3)),
        ("name='5'", ["name"], "5"),
        ("data.path=", ["data", "path"], ""),
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


@given(st.text())
def test_any_text_is_an_override_or_a_config_error(text: str) -> None:
    try:
        path, _ = parse_override(text)
    except ConfigError as error:
        message = str(error)
    else:
        assert text.startswith(".".join(path) + "=")
        return
    assert "an override is section.key=value" in message


@given(st.integers(1, 10**6), st.integers(1, 10**6))
def test_later_overrides_win_and_the_file_is_not_changed(first: int, second: int) -> None:
    values = dict(train=dict(steps=3), optimizer=dict(type="AdamW", lr=1e-3))
    before = copy.deepcopy(values)
    out = apply_overrides(values, [f"train.steps={first}", f"train.steps={second}", "optimizer.lr=0.5"])
    assert out == dict(train=dict(steps=second), optimizer=dict(type="AdamW", lr=0.5))
    assert values == before


def test_overrides_of_short_forms() -> None:
    tensor = load_config(dict(parallel=dict(tensor=4)), ["parallel.tensor.mode=2d"]).parallel.tensor
    assert (tensor.size, tensor.mode) == (4, "2d")
    tensor = load_config(dict(parallel=dict(tensor=dict(mode="2d", size=9))), ["parallel.tensor=4"]).parallel.tensor
    assert (tensor.size, tensor.mode) == (4, "2d")
    tensor = load_config({}, ["parallel.tensor=4", "parallel.tensor.mode=1d"]).parallel.tensor
    assert (tensor.size, tensor.mode) == (4, "1d")
    assert load_config({}, ["optimizer=SGD", "optimizer.lr=1"]).optimizer.spec() == dict(type="SGD", lr=1.0)
    assert load_config({}, ["data.type=TextFolder", "data.path=x"]).data.options == dict(path="x")


@pytest.mark.parametrize(
    ("config", "override", "words"),
    [
        ({}, "train.sed=3", "train.sed: no such key; did you mean train.seed?"),
        ({}, "trian.seed=3", "trian: no such key; did you mean train?"),
        ({}, "train.steps=many", "train.steps: must be a whole number, got 'many' (given on the command line)"),
        ({}, "comm.accounting=1", "comm.accounting: must be True or False, got 1 (given on the command line)"),
        ({}, "train.steps", "'train.steps' has no '=': an override is section.key=value, for example train.steps=50"),
        ({}, "train steps=3", "'train steps=3': 'train steps' is no key: an override is section.key=value"),
        ({}, "=3", "'=3': '' is no key"),
        ({}, "train.steps.x=3", "train.steps.x: train.steps is a single value and has no keys; write train.steps=..."),
        (dict(model=GPT), "model.num_layer=3", "model.num_layer: no such key; did you mean model.num_layers? known"),
        (
            dict(model=Net),
            "model.width=3",
            "model.width: model is given as an object (Net), which has no keys to override; "
            "write model = dict(type=Net, width=...) in the config",
        ),
        (dict(optimizer=dict(lr=1.0)), "optimizer=3", "optimizer: "),
        (dict(optimizer=dict(tables=dict(type="SGD"))), "optimizer.tables=3", "optimizer.tables: "),
        (dict(data=[1, 2]), "data.path=x", "data.path: data is given as an object ([1, 2]), which has no keys"),
    ],
)
def test_wrong_overrides(config: dict[str, Any], override: str, words: str) -> None:
    (found,) = problems(config, [override])
    assert found.startswith(words)


def test_only_overridden_keys_are_blamed_on_the_command_line() -> None:
    found = problems(dict(train=dict(seed=-1)), ["train.steps=0"])
    assert found == [
        "train.steps: must be at least 1, got 0 (given on the command line)",
        "train.seed: must be at least 0, got -1",
    ]


# Plans


def test_arithmetic_of_a_plan_that_does_not_multiply() -> None:
    (found,) = problems(dict(parallel=dict(data=2, pipeline=2, tensor=4), model=GPT), nproc=8)
    assert found.splitlines() == [
        "parallel: data 2 x pipeline 2 x tensor 4 = 16, but 8 processes",
        "  nearest plans that fit 8 processes:",
        "    parallel.tensor.size=2",
        "    parallel.pipeline.size=1",
        "    parallel.data=1",
        "    parallel.data=4 parallel.tensor.size=1",
        "  or keep the plan and start 16 processes (--nproc 16)",
    ]


def test_data_is_derived() -> None:
    assert load_config(dict(parallel=dict(tensor=2)), nproc=8).parallel.data == 4
    assert load_config(dict(parallel=dict(tensor=2))).parallel.data == 1
    (found,) = problems(dict(parallel=dict(pipeline=2, tensor=3)), nproc=8)
    assert found.startswith("parallel: pipeline 2 x tensor 3 = 6 does not divide 8 processes\n")
    assert "parallel.data" not in found
    (found,) = problems({}, nproc=0)
    assert found == "nproc = 0: the number of processes must be at least 1"


@pytest.mark.parametrize(
    ("tensor", "words"),
    [
        (dict(mode="2d", size=6), "parallel.tensor: 2d: parallel.tensor.size = 6 is not a square (q x q); use 4 or 9"),
        (dict(mode="3d", size=9), "parallel.tensor: 3d: parallel.tensor.size = 9 is not a cube (q x q x q); use 8 or"),
        (dict(mode="2.5d", size=6, depth=2), "parallel.tensor: 2.5d: parallel.tensor.size / depth = 6 / 2 = 3 is not"),
        (dict(mode="2d", size=4, shape=(2, 3)), "parallel.tensor: parallel.tensor.shape = (2, 3): mode 2d has 2 axes"),
        (dict(mode="2d", shape=(2, 3, 1)), "parallel.tensor: parallel.tensor.shape = (2, 3, 1): mode 2d has 2 axes"),
        (dict(mode="2d", size=4, depth=2), "parallel.tensor.depth = 2 means nothing in mode 2d; it is for mode 2.5d"),
    ],
)
def test_modes_that_do_not_factor(tensor: dict[str, Any], words: str) -> None:
    (found,) = problems(dict(parallel=dict(tensor=tensor)))
    assert found.startswith(words)


def test_batch() -> None:
    config = dict(parallel=dict(data=4), schedule=dict(microbatches=2), train=dict(global_batch_size=30))
    (found,) = problems(config)
    assert found.splitlines() == [
        "train.global_batch_size = 30 is not a multiple of data 4 x microbatches 2 = 8; nearest: 24 or 32",
        "  nearest plans that fit 4 processes:",
        "    parallel.data=1 parallel.tensor.size=4",
    ]
    (found,) = problems({**config, "train": dict(global_batch_size=3)})
    assert found.splitlines() == [
        "train.global_batch_size = 3 is not a multiple of data 4 x microbatches 2 = 8; nearest: 8",
        "  no plan of these axes fits 4 processes, this model and this batch",
    ]


@pytest.mark.parametrize(
    ("options", "parallel", "words"),
    [
        (dict(hidden_size=100), dict(), "model.hidden_size = 100 is not a multiple of model.num_heads = 8; near"),
        (dict(ffn_hidden_size=510), dict(tensor=4), "model.ffn_hidden_size = 510 is not a multiple of parallel"),
        (
            dict(num_heads=12, num_kv_heads=4, hidden_size=144),
            dict(tensor=6),
            "model.num_kv_heads = 4 does not divide parallel.tensor.size = 6: of key/value heads that are fewer "
            "than the ranks each serves as many ranks",
        ),
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
        (
            dict(seq_len=30),
            dict(tensor=dict(size=4, sequence_sharded=True)),
            "model.seq_len = 30 is not a multiple of parallel.tensor.size = 4; nearest: 28 or 32",
        ),
        (
            dict(),
            dict(pipeline=8),
            "model.num_layers = 4 gives 6 blocks (layers and both ends), fewer than parallel.pipeline.size = 8; every "
            "stage needs a block",
        ),
    ],
)
def test_model_does_not_divide(options: dict[str, Any], parallel: dict[str, Any], words: str) -> None:
    (found,) = problems(dict(model={**GPT, **options}, parallel=parallel))
    assert found.startswith(words)
    assert "nearest plans" in found or "no plan" in found


@pytest.mark.parametrize("split", ["equal", [], [0, 3], [True, 2]])
def test_wrong_split(split: Any) -> None:
    (found,) = problems(dict(parallel=dict(pipeline=dict(size=2, split=split))))
    assert found.startswith("parallel.pipeline.split: must be 'parameters' or the number of blocks of each stage")
    assert found.endswith(f"got {split!r}")


def test_wrong_model_options() -> None:
    found = problems(dict(model={**GPT, "mlp": "relu", "dropout": 1.0, "num_layer": 3, "num_heads": 0}))
    assert [line.partition(":")[0] for line in found] == [
        "model.num_heads",
        "model.mlp",
        "model.dropout",
        "model.num_layer",
    ]
    assert "did you mean model.num_layers?" in found[-1]


def test_options_class_of_a_user(monkeypatch: pytest.MonkeyPatch) -> None:
    class Options:
        def __init__(self, width: int = 1) -> None:
            self.width = width

        def check(self, parallel: Any) -> list[str]:
            return [] if self.width % parallel.tensor.size == 0 else [f"model.width = {self.width} is odd"]

    monkeypatch.setitem(MODELS._entries, "theirs", Net)
    monkeypatch.setitem(MODEL_OPTIONS._entries, "theirs", Options)
    load_config(dict(model=dict(type="theirs", width=4), parallel=dict(tensor=2)))
    (found,) = problems(dict(model=dict(type="theirs", width=3), parallel=dict(tensor=2)))
    assert found.startswith("model.width = 3 is odd\n")
    (found,) = problems(dict(model=dict(type="theirs", depth=3)))
    assert found.startswith("model: ")
    assert "'depth'" in found


sizes = st.integers(1, 6)


@st.composite
def plans(draw: st.DrawFn) -> dict[str, Any]:
    mode = draw(st.sampled_from(["1d", "2d", "2.5d", "3d"]))
    parallel: dict[str, Any] = dict(
        pipeline=draw(st.integers(1, 3)), sequence=draw(st.integers(1, 2)), tensor=dict(mode=mode, size=draw(sizes))
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


def test_suggestions_do_not_use_axes_that_the_config_does_not() -> None:
    config = load_config(dict(parallel=dict(data=2, tensor=2)))
    for plan in nearest_plans(config, None, 4, most=100):
        assert "pipeline" not in plan
        assert "sequence" not in plan


# The resolved config


def test_as_dict_is_json() -> None:
    config = load_config(dict(model=Net, data=iter([]), hooks=[print, dict(type=Net, width=Path("a"))]))
    data = json.loads(json.dumps(as_dict(config)))
    assert data["model"] == dict(type=f"{__name__}:Net")
    assert data["data"] == "<builtins:list_iterator>"
    assert data["hooks"] == ["builtins:print", dict(type=f"{__name__}:Net", width="a")]
    assert data["parallel"]["data"] == 1


options = st.dictionaries(st.text("abc ", min_size=1), st.text() | st.lists(st.integers()) | st.none())


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


def test_a_printed_config_may_have_any_key() -> None:
    options = {"if": 1, "a b": 2, "inner": {"class": [1], "x": None}}
    with mock.patch.dict(OPTIMIZERS._entries, free=lambda parameters, **rest: None):
        source = as_source(load_config(dict(optimizer=dict(type="free", **options))))
        namespace: dict[str, Any] = {}
        exec(source, namespace)
    assert namespace["optimizer"] == dict(type="free", lr=3e-4, **options)


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
        (dict(optimizer=dict(tables="AdamW")), "optimizer.tables.type: no optimizer of tables named 'AdamW'. Did you "),
        (dict(optimizer=dict(tables=dict(lr=0.1))), "optimizer.tables.type: "),
        (dict(optimizer=dict(tables=dict(type="SGD", lr=0))), "optimizer.tables.lr: must be greater than 0, got 0"),
        (
            dict(optimizer=dict(tables=dict(type="Adagrad", epps=1))),
            "optimizer.tables.epps: no such key; did you mean optimizer.tables.eps?",
        ),
        (
            dict(optimizer=dict(tables=dict(type="SGD", weight_decay=0.1))),
            "optimizer.tables.weight_decay: must be 0: rows that a step has not looked up do not change",
        ),
        (
            dict(optimizer=dict(tables=dict(type="SparseAdam", amsgrad=True))),
            "optimizer.tables.amsgrad: must be False: there is no form of amsgrad for rows, got True",
        ),
        (dict(data=dict(type="PythonStdlib", num_workers=True)), "data.num_workers: must be a whole number"),
        (dict(data=dict(type="PythonStdlib", num_worker=2)), "data.num_worker: no such key; did you mean data.num_wor"),
    ],
)
def test_wrong_options_of_components(config: dict[str, Any], words: str) -> None:
    (problem,) = problems(config)
    assert problem.startswith(words)


def test_right_options_pass() -> None:
    load_config(dict(optimizer=dict(weight_decay=0, betas=[0.0, 0.99], eps=1e-9, amsgrad=True)))
    load_config(dict(optimizer=dict(type="SGD", momentum=0.9, nesterov=True)))
    tables = load_config(dict(optimizer=dict(tables=dict(type="RowWiseAdagrad", eps=1e-3)))).optimizer.tables
    assert tables is not None
    assert tables.spec() == dict(type="RowWiseAdagrad", lr=None, eps=1e-3)
    load_config(dict(lr_schedule=dict(type=lambda progress, min_ratio, power: 1.0, power=2)))
    load_config(dict(data=dict(type="PythonStdlib", num_workers=2, collate_fn=list, validation=[1])))
    load_config(dict(data=dict(type="PythonStdlib", num_workers=0), model=dict(GPT, vocab_size=256), name="x" * 200))


def test_an_override_may_be_a_dict_as_in_config_files() -> None:
    assert load_config({}, ["parallel.tensor=dict(size=4, mode='2d')"]).parallel.tensor.mode == "2d"
    config = load_config({}, ["optimizer=dict(type='SGD', lr=0.5)", "hooks=[dict(type='TensorBoard')]"])
    assert (config.optimizer.type, config.optimizer.lr, config.hooks[0].type) == ("SGD", 0.5, "TensorBoard")
    assert parse_override("a=dict(size=f())") == (["a"], "dict(size=f())")
    assert parse_override("a=dict([1])") == (["a"], "dict([1])")


def test_a_file_is_compiled_as_python_would(tmp_path: Path) -> None:
    """Annotations are values, as the file has no ``from __future__`` of its own; a byte-order mark is none of it."""
    file = tmp_path / "own.py"
    text = "class _Sizes:\n    width: int = 3\n\ntrain = dict(steps=_Sizes.__annotations__['width'] is int and 7)\n"
    file.write_bytes(b"\xef\xbb\xbf" + text.encode())
    assert load_config(file).train.steps == 7


def test_plans_of_a_billion_ranks_answer_at_once() -> None:
    begin = time.monotonic()
    config = load_config(dict(parallel=dict(data=10**6, tensor=1000), train=dict(global_batch_size=10**6)))
    assert world_size(config.parallel) == 10**9
    assert problems(dict(parallel=dict(data=7)), nproc=10**9)[0].startswith("parallel: data 7 = 7, but 1000000000")
    assert time.monotonic() - begin < 5
