"""The examples follow plain torch in every tensor mode, `PatchEmbedding` is the convolution, the guide's code runs."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from helpers.examples import ROOT, example
from helpers.ranks import run_ranks
from helpers.segments import OWN_SLOT_BYTES
from helpers.training import Trace, relative
from torch import Tensor, nn

import colossus
from colossus import layers
from colossus.cli.main import main
from colossus.comm import shared_memory
from colossus.config import load_config
from colossus.context.parallel_context import ParallelContext
from colossus.data.batch import shard_of_batch
from colossus.gradients.gradient_axes import gradient_sum_axes
from colossus.layers.model_parallel import model_parallel_of
from colossus.state.model_state_dict import full_state_dict

GUIDE = ROOT / "docs" / "migration.md"
GUIDES = ("migration.md", "your-model.md", "weights-and-hooks.md", "own-loop.md")
BATCH, STEPS, LR = 8, 3, 0.1

PLANS: dict[str, tuple[int, dict[str, Any]]] = {
    "1d": (2, dict(size=2)),
    "1d_sharded": (2, dict(size=2, sequence_sharded=True)),
    "2d": (4, dict(mode="2d", size=4)),
    "2.5d": (4, dict(mode="2.5d", shape=(2, 2, 1))),
    "3d": (4, dict(mode="3d", shape=(2, 1, 2))),
}


#: examples under plans that run with -m long
REST = (("mlp", "2d"), ("mlp", "3d"), ("vit", "1d"), ("vit", "2.5d"))


def close(tensor: Tensor, wanted: Tensor, what: str) -> None:
    torch.testing.assert_close(tensor, wanted, rtol=1e-9, atol=1e-12, msg=lambda m: f"{what}: {m}")


# -- the examples ------------------------------------------------------------------------------------------


def batches(name: str) -> list[tuple[Tensor, Tensor]]:
    data = example(name).data["type"](samples=BATCH * STEPS)
    return [(x.double(), labels) for x, labels in zip(*(t.split(BATCH) for t in data.tensors), strict=True)]


def train(rank: int, name: str, tensor: dict[str, Any]) -> Trace:
    """Body of a rank: the example as a config file."""
    overrides = [
        *(f"parallel.tensor.{key}={value}" for key, value in tensor.items()),
        "data.samples=16", "train.precision=fp64", f"train.global_batch_size={BATCH}", "train.clip_grad_norm=None",
        "optimizer.type=SGD", f"optimizer.lr={LR}", "lr_schedule.type=constant", "lr_schedule.warmup_steps=0",
    ]  # fmt: skip
    engine = colossus.initialize(ROOT / "examples" / f"{name}.py", overrides=overrides)
    trace = Trace()
    trace.start = full_state_dict(engine.model, engine.context)
    for step, batch in enumerate(batches(name)):
        trace.losses.append(engine.train_step(batch).loss)
        if step == 0:
            trace.gradients.append(full_state_dict(engine.model, engine.context, gradients=True))
    trace.end = full_state_dict(engine.model, engine.context)
    engine.close()
    return trace


@contextmanager
def plain(module: ModuleType) -> Iterator[None]:
    """The example with the layers it imports from colossus taken from torch.nn."""
    ours = {name: getattr(layers, name) for name in layers.__all__ if vars(module).get(name) is getattr(layers, name)}
    assert set(ours) <= {"Embedding", "LayerNorm", "Linear"}
    assert "Linear" in ours
    try:
        vars(module).update({name: getattr(nn, name) for name in ours})
        yield
    finally:
        vars(module).update(ours)


@cache
def reference(name: str) -> Trace:
    """Plain torch's run from the weights with which one process of ours starts."""
    trace = Trace()
    trace.start = run_ranks(1, train, name, {}, with_context=False)[0].start
    with plain(example(name)):
        model: Any = example(name).model["type"]().double()
    assert not any(isinstance(module, layers.Linear) for module in model.modules())
    model.load_state_dict(trace.start)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    for step, batch in enumerate(batches(name)):
        total, count = model.loss(model(batch[0]), batch)
        optimizer.zero_grad()
        (total / count).backward()
        trace.losses.append((total / count).item())
        if step == 0:
            trace.gradients.append({key: value.grad.clone() for key, value in model.named_parameters()})
        optimizer.step()
    trace.end = {key: value.detach() for key, value in model.state_dict().items()}
    return trace


def assert_follows(trace: Trace, wanted: Trace) -> None:
    """What names the culprit comes first: the loss of the start, each gradient, then what follows from them."""
    losses = list(zip(trace.losses, wanted.losses, strict=True))
    assert relative(*losses[0]) < 1e-10, f"loss of step 1: {losses[0]}"
    assert_same(trace.gradients[0], wanted.gradients[0], "gradient")
    for step, pair in enumerate(losses, 1):
        assert relative(*pair) < 1e-10, f"loss of step {step}: {pair}"
    assert_same(trace.end, wanted.end, "weight")


def assert_same(tensors: dict[str, Tensor], wanted: dict[str, Tensor], what: str) -> None:
    assert tensors.keys() == wanted.keys()
    for name, value in wanted.items():
        close(tensors[name], value, f"{what} of {name}")


@pytest.mark.rest("vit-2d", "mlp-2.5d", "vit-3d", "mlp-1d_sharded")
@pytest.mark.parametrize(
    ("name", "plan"),
    [
        pytest.param(name, plan, marks=pytest.mark.long if (name, plan) in REST else ())
        for name in ("mlp", "vit")
        for plan in PLANS
    ],
)
def test_an_example_follows_the_same_model_of_torch_nn(name: str, plan: str) -> None:
    world, tensor = PLANS[plan]
    for trace in run_ranks(world, train, name, tensor, with_context=False):
        for key, value in reference(name).start.items():
            assert torch.equal(trace.start[key], value), f"{key} starts differently"
        assert_follows(trace, reference(name))


@pytest.mark.parametrize("name", ["mlp", "vit"])
def test_an_example_can_be_launched(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(ROOT / "examples" / f"{name}.py")
    assert main(["launch", path, "parallel.tensor.mode=2d", "parallel.tensor.size=4", "--dry-run"]) == 0
    assert "4 processes" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["mlp", "vit"])
@pytest.mark.rest("vit")
def test_an_example_learns(name: str) -> None:
    def body(rank: int) -> list[float]:
        overrides = ["lr_schedule.type=constant", "lr_schedule.warmup_steps=5"]
        engine = colossus.initialize(ROOT / "examples" / f"{name}.py", overrides=overrides)
        return [engine.train_step(batch).loss for batch, _ in zip(engine.loader, range(40), strict=False)]

    losses = run_ranks(1, body, with_context=False)[0]
    assert sum(losses[-5:]) < 0.6 * sum(losses[:5])


# -- PatchEmbedding ----------------------------------------------------------------------------------------

#: in_channels, hidden_size, patch, bias: sizes that split by output and input, by input, by output, not at all
PATCHES: list[tuple[int, int, Any, bool]] = [(3, 8, 2, True), (2, 12, (2, 4), False), (4, 7, 2, True),
                                             (1, 8, (3, 1), True), (1, 7, (1, 3), False)]  # fmt: skip


def numbers(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def embed_patches(rank: int, tensor: dict[str, Any]) -> list[dict[str, Any]]:
    """Outputs, gradients of images, and whole parameters and gradients, with the rank's place in the batch."""
    config = load_config(dict(parallel=dict(tensor=tensor), device="cpu"))
    context = ParallelContext.from_config(config)
    axes = model_parallel_of(context).regions.whole.batch
    at, count = (context.index(axes), context.size(axes)) if axes else (0, 1)
    cases = []
    for case, options in enumerate(PATCHES):
        model: Any = colossus.build(
            lambda options=options: layers.PatchEmbedding(*options), context, dtype=torch.float64
        )
        images = shard_of_batch(numbers(BATCH, options[0], 6, 12, seed=case), at, count).clone().requires_grad_()
        out = model(images)
        (out * shard_of_batch(numbers(BATCH, *out.shape[1:], seed=case + 50), at, count)).sum().backward()
        for parameter in model.parameters():
            axes = gradient_sum_axes(parameter, context)
            if axes:
                torch.distributed.all_reduce(parameter.grad, group=context.group(axes).process_group)
        cases.append(
            {"place": (at, count), "output": out.detach(), "gradient of images": images.grad,
             "state": full_state_dict(model, context), "gradients": full_state_dict(model, context, gradients=True)}
        )  # fmt: skip
    return cases


@pytest.mark.rest("1d", "2.5d", "2d")
@pytest.mark.parametrize("plan", ["alone", *PLANS])
def test_patch_embedding_is_the_convolution(plan: str) -> None:
    world, tensor = PLANS.get(plan, (1, {}))
    results = run_ranks(world, embed_patches, tensor, with_context=False)
    for case, (channels, hidden, patch, bias) in enumerate(PATCHES):
        conv = nn.Conv2d(channels, hidden, patch, stride=patch, bias=bias, dtype=torch.float64)
        state = results[0][case]["state"]
        conv.load_state_dict({name: value.view_as(getattr(conv, name)) for name, value in state.items()})
        images = numbers(BATCH, channels, 6, 12, seed=case).requires_grad_()
        wanted = conv(images).flatten(2).transpose(1, 2)
        (wanted * numbers(*wanted.shape, seed=case + 50)).sum().backward()
        for rank, cases in enumerate(results):
            result = cases[case]
            where = f"case {case}, rank {rank}"
            close(result["output"], shard_of_batch(wanted.detach(), *result["place"]), f"{where}, output")
            close(result["gradient of images"], shard_of_batch(images.grad, *result["place"]), f"{where}, images")
            assert result["gradients"].keys() == dict(conv.named_parameters()).keys()
            for name, grad in result["gradients"].items():
                close(grad, getattr(conv, name).grad.view_as(grad), f"{where}, gradient of {name}")


def test_patch_embedding_starts_as_a_convolution_does() -> None:
    embed = layers.PatchEmbedding(3, 512, 4)
    conv = nn.Conv2d(3, 512, 4, stride=4)
    assert embed.weight.shape == conv.weight.flatten(1).shape
    for parameter, wanted in ((embed.weight, conv.weight), (embed.bias, conv.bias)):
        assert parameter.abs().max() <= 48**-0.5
        assert parameter.abs().max().item() == pytest.approx(wanted.abs().max().item(), rel=0.02)
        assert parameter.std().item() == pytest.approx(wanted.std().item(), rel=0.1)


@pytest.mark.parametrize(
    ("shape", "match"),
    [
        ((2, 3, 7, 12), "height 7 does not divide into patches of 2; use 6 or 8"),
        ((2, 3, 6, 10), "width 10 does not divide into patches of 4; use 8 or 12"),
        ((2, 3, 6, 3), "width 3 does not divide into patches of 4; use 4"),
        ((2, 1, 6, 12), r"shape \(2, 1, 6, 12\); .* with 3 channels"),
        ((3, 6, 12), r"shape \(3, 6, 12\); it takes \[batch, channels, height, width\]"),
    ],
)
def test_images_that_are_no_patches_are_refused(shape: tuple[int, ...], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        layers.PatchEmbedding(3, 8, (2, 4))(torch.zeros(shape))


# -- guides ---------------------------------------------------------------------------------------------------


def blocks(kind: str, guide: Path = GUIDE) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```$", guide.read_text(), flags=re.DOTALL | re.MULTILINE)


def run_guides(rank: int, tensor: str) -> None:
    for name in GUIDES:
        code = "\n".join(blocks("python", ROOT / "docs" / name))
        assert code.count("tensor=1") == 1
        exec(compile(code.replace("tensor=1", f"tensor={tensor}"), name, "exec"), {"__name__": "guide"})


@pytest.mark.parametrize(("world", "tensor"), [(1, "1"), (2, "2"), (4, "dict(mode='2d', size=4)")])
@pytest.mark.rest("1-1", "4-dict(mode='2d', size=4)")
def test_the_guides_run(world: int, tensor: str) -> None:
    run_ranks(world, run_guides, tensor, with_context=False)


class Up(nn.Module):
    def __init__(self, init: bool = False) -> None:
        super().__init__()
        self.up = layers.Linear(8, 16, split="column")
        if init:
            nn.init.normal_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(x)


@pytest.mark.parametrize("what", ["softmax", "nn.init", "a mean"])
def test_the_messages_in_the_guide_are_those_raised(what: str) -> None:
    def body(rank: int) -> str:
        config = dict(parallel=dict(tensor=2), train=dict(global_batch_size=2), device="cpu")

        def loss_fn(outputs: Tensor, batch: Tensor) -> Any:
            heads = outputs.view(2, 3, 4, 4).transpose(1, 2)
            return layers.to_whole(outputs).mean() if what == "a mean" else heads.softmax(1)

        try:
            engine = colossus.initialize(config, model=lambda: Up(what == "nn.init"), loss_fn=loss_fn)
            engine.train_step(torch.ones(2, 3, 8))
        except ValueError as error:
            return str(error)
        return "nothing was raised"

    quoted = [" ".join(text.split()) for text in blocks("text")]
    assert len(quoted) == 3
    for message in run_ranks(2, body, with_context=False):
        assert message.partition("\n(")[0] in quoted  # what follows says where it was raised


def count_traffic(rank: int, name: str | None) -> list[str]:
    """The rows of the table, or what a pair sends in one mode."""
    module = example("count_traffic")
    if name is not None:
        calls, sent = module.count(module.PLANS[name], "pair")
        return [f"{sent:.1f} MB, {calls} calls"]
    return list(module.table())


@pytest.mark.parametrize("name", ["2.5d, 2 x 2 x 2", pytest.param(None, marks=pytest.mark.long)])
def test_the_traffic_in_the_guide_is_what_is_counted(name: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "SLOT_BYTES", OWN_SLOT_BYTES)
    lines = GUIDE.read_text().splitlines()
    rows = run_ranks(8, count_traffic, name, with_context=False, timeout=250)[0]
    if name is None:
        assert set(rows) <= set(lines)
    else:
        assert [line.split(" | ")[2] for line in lines if line.startswith(f"| {name} |")] == rows


# -- loops of one's own --------------------------------------------------------------------------------------


def run_main(rank: int, name: str, words: list[str]) -> None:
    sys.argv = [f"{name}.py", *words]
    example(name).main()


def test_a_loop_of_ones_own_is_the_same_under_a_plan(tmp_path: Path) -> None:
    logs = []
    for world, plan in ((1, []), (4, ["parallel.pipeline=2", "parallel.tensor=2", "schedule.microbatches=4"])):
        log = tmp_path / f"{world}.jsonl"
        run_ranks(world, run_main, "own_loop", [*plan, "train.steps=20", f"log={log}"], with_context=False)
        logs.append([json.loads(line) for line in log.read_text().splitlines()])
    alone, planned = logs
    assert [row["step"] for row in planned] == list(range(1, 21))
    assert alone[-1]["loss"] < 0.5 * alone[0]["loss"]
    assert {"validation"} == alone[-1].keys() - alone[0].keys()
    for mine, other in zip(planned, alone, strict=True):
        for key in other.keys() - {"seconds"}:
            assert mine[key] == pytest.approx(other[key], rel=1e-4), (key, other["step"])


def test_fine_tuning_saves_the_same_adapters_under_a_plan(tmp_path: Path) -> None:
    saved = []
    for world, plan in ((1, []), (2, ["parallel.tensor=2"])):
        path = tmp_path / f"{world}.pt"
        words = [*plan, "train.steps=4", f"save={path}", f"checkpoint.dir={tmp_path / 'trunk'}"]
        run_ranks(world, run_main, "finetune", words, with_context=False)
        saved.append(torch.load(path))
    alone, planned = saved
    assert list(planned) == list(alone)
    assert all(example("finetune").is_adapter(name) for name in alone)
    assert len(alone) == 2 * (4 + 2 + 2 + 2)  # of two layers; query, key and value have one `first`
    for name, value in alone.items():
        assert value.abs().max() > 0
        torch.testing.assert_close(planned[name], value, rtol=1e-3, atol=1e-4, msg=name)
