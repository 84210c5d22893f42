"""Cutting a model into pipeline stages: where the cuts are, what a rank then holds, and that it starts the same."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from helpers.drawn import examples
from helpers.ranks import grid, run_ranks
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from colossus import layers
from colossus.construct import allocate
from colossus.construct.build_model import build
from colossus.construct.init_trace import InitTrace
from colossus.context.parallel_context import ParallelContext
from colossus.layers import PipelineBlock
from colossus.layers.pipeline_block import pipeline_blocks
from colossus.layout.parameter import logical_parameters
from colossus.layout.split_parameter import as_shards
from colossus.models.gpt import GPT
from colossus.schedule.bounds import split_chain
from colossus.schedule.partition import Partition, keep_stages_of, make_partition

SIZES: dict[str, Any] = dict(num_layers=4, hidden_size=16, num_heads=2, vocab_size=19, seq_len=6)


def meta(factory: Callable[[], nn.Module]) -> nn.Module:
    return build(factory, ParallelContext(grid()), materialize=False)


def straight(num_stages: int) -> dict[int, int]:
    """One stage on each rank."""
    return {stage: stage for stage in range(num_stages)}


def stage_of(factory: Callable[[], nn.Module], rank_of: dict[int, int], rank: int, **options: Any) -> Any:
    """A built model with a rank's stages only, and its partition."""
    held: list[Partition] = []

    def prepare(model: nn.Module) -> None:
        held.append(make_partition(model, rank_of, **options))
        keep_stages_of(model, held[0], rank)

    return build(factory, ParallelContext(grid(), seed=3), prepare=prepare), held[0]


# -- blocks ---------------------------------------------------------------------------------------------------


class Mixed(nn.Module):
    """Our layers and torch's, weights tied across the chain, a lone parameter, buffers, and things noted elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 8)
        self.start = nn.Parameter(torch.randn(8))
        self.recurrent = nn.LSTM(8, 8, batch_first=True)
        self.wide = layers.Linear(8, 8)
        encoder = nn.TransformerEncoderLayer(8, 2, 8, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(encoder, 2, enable_nested_tensor=False)  # deep copies of one layer
        self.norm = nn.BatchNorm1d(6)
        self.gated = layers.Linear(8, 8)
        self.gated.weight = self.wide.weight
        self.head = nn.Linear(8, 11)
        self.head.weight = self.table.weight
        self.register_buffer("scale", torch.rand(8))
        self.register_buffer("shift", torch.rand(8))
        self.noise = torch.rand(8)
        self.norm.noise = torch.rand(3)  # type: ignore[assignment]

    def pipeline_blocks(self) -> list[Any]:
        return [
            PipelineBlock(self._embed, self.table, "start", name="embedding"),
            PipelineBlock(lambda x: self.recurrent(x)[0], "recurrent"),
            self.wide,
            *self.encoder.layers,
            PipelineBlock(lambda x: self.norm(x) + self.shift, self.norm, "shift"),
            self.gated,
            self.head,
        ]

    def _embed(self, ids: Tensor) -> Tensor:
        return self.table(ids) * self.scale + self.start

    def forward(self, ids: Tensor) -> Tensor:
        return layers.run_blocks(self.pipeline_blocks(), ids)


def test_blocks_of_the_gpt() -> None:
    blocks = pipeline_blocks(meta(lambda: GPT(**SIZES)))
    assert [block.name for block in blocks] == ["embedding", "blocks.0", "blocks.1", "blocks.2", "blocks.3", "head"]
    assert blocks[0].parameters == ("embedding.weight", "positions.weight")
    assert blocks[0].modules == ("embedding", "positions", "dropout")
    assert blocks[-1].parameters == ("norm.weight", "norm.bias", "embedding.weight")  # tied: by its first name
    rotary = pipeline_blocks(meta(lambda: GPT(**{**SIZES, "tie_embeddings": False, "positions": "rotary"})))
    assert rotary[0].parameters == ("embedding.weight",)
    assert rotary[-1].parameters[-1] == "head.weight"


def test_blocks_of_what_a_user_writes() -> None:
    blocks = pipeline_blocks(meta(Mixed))
    names = ["embedding", "recurrent", "wide", "encoder.layers.0", "encoder.layers.1", "norm", "gated", "head"]
    assert [block.name for block in blocks] == names
    assert blocks[0].parameters == ("table.weight", "start")
    assert blocks[6].parameters == ("wide.weight", "gated.bias")
    assert blocks[7].parameters == ("table.weight", "head.bias")
    assert blocks[5].buffers == ("norm.running_mean", "norm.running_var", "norm.num_batches_tracked", "shift")


class Chain(nn.Sequential):
    pass


def test_a_sequential_is_a_chain() -> None:
    twice = nn.Linear(3, 3)
    model = nn.Sequential(nn.Linear(2, 3), Chain(twice, nn.Sequential(nn.ReLU())), nn.Identity(), nn.Sequential(twice))
    blocks = pipeline_blocks(model)
    assert [block.name for block in blocks] == ["0", "1.0", "1.1.0", "2", "1.0 (2)"]
    assert blocks[1].parameters == blocks[4].parameters == ("1.0.weight", "1.0.bias")
    act = nn.ReLU()
    assert [block.name for block in pipeline_blocks(nn.Sequential(act, nn.Linear(2, 2), act))] == ["0", "1", "0 (2)"]
    x = torch.randn(4, 2)
    assert torch.equal(layers.run_blocks([block.call for block in blocks], x), model(x))


class Given(nn.Module):
    """A model whose blocks are whatever a test says."""

    def __init__(self, blocks: Callable[[Any], Any]) -> None:
        super().__init__()
        self.first, self.rest = nn.Linear(2, 2), nn.ModuleList(nn.Linear(2, 2) for _ in range(2))
        self._blocks = blocks

    def pipeline_blocks(self) -> Any:
        return self._blocks(self)


WRONG_BLOCKS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a number": (
        lambda m: [m.first, 3],
        r"block 1 of Given\.pipeline_blocks\(\) is a int, neither a module nor a Pipe",
    ),
    "one module": (lambda m: m.first, r"pipeline_blocks\(\) returned a Linear, not a list"),
    "empty": (lambda m: [], "Given has no block: its chain is empty"),
    "unknown name": (
        lambda m: [PipelineBlock(m.first, "rest.10")],
        r"block 0 owns 'rest.10' that Given does not have",
    ),
    "not of the model": (
        lambda m: [PipelineBlock(m.first, nn.Linear(2, 2), name="top")],
        r"block 0 \(top\) owns a Linear that Given does not have",
    ),
    "unowned": (
        lambda m: [m.first, m.rest[0]],
        r"no pipeline block of Given owns rest\.1\.weight, rest\.1\.bias: list them in .*PipelineBlock\(call, 'rest",
    ),
    "no callable": (lambda m: [PipelineBlock("first")], "the first argument must be a callable"),
}


@pytest.mark.parametrize("name", WRONG_BLOCKS)
def test_wrong_blocks(name: str) -> None:
    blocks, message = WRONG_BLOCKS[name]
    with pytest.raises(ValueError, match=message):
        pipeline_blocks(Given(blocks))


def test_a_model_that_is_no_chain_is_told_how() -> None:
    with pytest.raises(ValueError, match="LSTM does not define its pipeline blocks") as caught:
        pipeline_blocks(nn.LSTM(2, 2))
    assert "def pipeline_blocks(self):" in str(caught.value)
    assert "nn.Sequential" in str(caught.value)


# -- balance --------------------------------------------------------------------------------------------------


def _rank(bounds: Sequence[int], costs: Sequence[int]) -> tuple[int, int, int]:
    spans = list(itertools.pairwise(bounds))
    values = [sum(costs[start:stop]) for start, stop in spans]
    return max(values), sum(v * v for v in values), sum((stop - start) ** 2 for start, stop in spans)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=8), st.data())
@settings(max_examples=examples(300))
def test_split_chain_is_the_best_of_all_cuts(costs: list[int], data: st.DataObject) -> None:
    blocks = len(costs)
    stages = data.draw(st.integers(1, blocks))
    bounds = split_chain(tuple(costs), stages)
    assert (bounds[0], bounds[-1], len(bounds)) == (0, blocks, stages + 1)
    assert all(a < b for a, b in itertools.pairwise(bounds))
    every = [(0, *inner, blocks) for inner in itertools.combinations(range(1, blocks), stages - 1)]
    assert _rank(bounds, costs) == min(_rank(other, costs) for other in every)


# -- partitions -----------------------------------------------------------------------------------------------


@given(st.integers(1, 6), st.booleans(), st.booleans())
@settings(max_examples=examples(20))
def test_every_parameter_is_on_one_stage_or_tied(num_stages: int, tied: bool, rotary: bool) -> None:
    options = {**SIZES, "tie_embeddings": tied, "positions": "rotary" if rotary else "learned"}
    model = meta(lambda: GPT(**options))
    made = make_partition(model, straight(num_stages))
    assert tuple(made.sizes) == tuple(name for name, _ in model.named_parameters())
    for name, stages in made.stages_of.items():
        shared = tied and name == "embedding.weight" and num_stages > 1
        assert stages == ((0, num_stages - 1) if shared else stages[:1]), name
        assert made.ranks_of(name) == stages
    listed = {name for stage in range(num_stages) for name in made.parameters_on(stage)}
    assert listed == set(made.sizes)
    assert made.num_stages == num_stages


WRONG_SPLITS: list[tuple[Any, str]] = [
    ([3, 3], r"split = \[3, 3\]: 2 numbers for 3 stages; give the number of blocks of each stage"),
    ([2, 2, 1], r"2 \+ 2 \+ 1 = 5, but the model has 6 blocks \(embedding, blocks\.0 to blocks\.3, head\)"),
    ([6, 0, 0], "every stage needs a block, but stage 1 has 0"),
    ("layers", "split = 'layers': use 'parameters', or the number of blocks"),
]


@pytest.mark.parametrize(("split", "message"), WRONG_SPLITS)
def test_wrong_splits(split: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_partition(meta(lambda: GPT(**SIZES)), straight(3), split)


# -- what a rank holds ----------------------------------------------------------------------------------------


PLACES: dict[str, tuple[dict[int, int], Any]] = {
    "two ranks": ({0: 0, 1: 1}, [4, 4]),
    "every block": (straight(8), [1] * 8),
    "interleaved": ({0: 0, 1: 1, 2: 0, 3: 1}, [2, 2, 2, 2]),
    "there and back": ({0: 0, 1: 1, 2: 1, 3: 0}, "parameters"),
}


@pytest.mark.parametrize("name", PLACES)
@pytest.mark.parametrize("factory", [Mixed, lambda: GPT(**{**SIZES, "num_layers": 6})], ids=["mixed", "gpt"])
def test_the_same_start_without_the_rest(factory: Callable[[], nn.Module], name: str) -> None:
    """Bit for bit, under the names of the whole model, in its order, and nothing of other ranks."""
    rank_of, split = PLACES[name]
    whole = build(factory, ParallelContext(grid(), seed=3))
    wanted = dict(whole.named_parameters())
    logical = {item.name: item.local() for item in logical_parameters(whole)}
    state = whole.state_dict()
    for rank in sorted(set(rank_of.values())):
        model, made = stage_of(factory, rank_of, rank, split=split)
        own = [key for key in made.sizes if rank in made.ranks_of(key)]
        assert [key for key, _ in model.named_parameters()] == own
        for key, parameter in model.named_parameters():
            assert torch.equal(parameter, wanted[key]), key
        for item in logical_parameters(model):
            assert torch.equal(item.local(), logical[item.name]), item.name
        for key, value in model.state_dict().items():
            assert torch.equal(value, state[key]), key
        assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))


def _sharded_start(context: ParallelContext) -> tuple[int, int]:
    whole = build(lambda: GPT(**SIZES), context)
    rank = context.index("pipeline")

    def prepare(model: nn.Module) -> None:
        keep_stages_of(model, make_partition(model, straight(2)), rank)

    own = build(lambda: GPT(**SIZES), context, prepare=prepare)
    wanted = dict(whole.named_parameters())
    for name, parameter in own.named_parameters():
        with as_shards():
            assert torch.equal(parameter, wanted[name]), name
    return rank, sum(parameter.numel() for parameter in own.parameters())


def test_the_same_start_of_sharded_stages() -> None:
    sizes = run_ranks(4, _sharded_start, plan=grid(pipeline=2, tensor=2), seed=5)
    assert [rank for rank, _ in sizes] == [0, 0, 1, 1]
    assert sizes[0] == sizes[1]


def test_what_is_here_and_what_is_not() -> None:
    first, _ = stage_of(Mixed, straight(2), 0, split=[4, 4])
    last, _ = stage_of(Mixed, straight(2), 1, split=[4, 4])
    assert first.head.weight is first.table.weight  # one parameter, all its names
    assert last.head.weight is last.table.weight
    assert last.gated.weight is last.wide.weight
    for module, leaf in ((last.wide, "bias"), (last, "start"), (first.head, "bias"), (first.norm, "weight")):
        assert not hasattr(module, leaf)  # None would be a legal value of some
    # buffers of modules and those that a block owns are where the block is, others everywhere
    assert not hasattr(first.norm, "running_mean")
    assert not hasattr(first, "shift")
    assert last.shift.shape == first.scale.shape == last.scale.shape == (8,)
    # plain attributes: of the model everywhere, of another rank's module nowhere
    assert not first.noise.is_meta
    assert first.norm.noise.is_meta
    assert not last.norm.noise.is_meta
    assert all(tensor.is_meta for tensor in last.recurrent._flat_weights)
    assert all(not tensor.is_meta for tensor in first.recurrent._flat_weights)
    again = copy.deepcopy(last)
    assert again.state_dict().keys() == last.state_dict().keys()
    assert "wide.weight" in last.state_dict()


def test_calling_what_is_elsewhere() -> None:
    model, _ = stage_of(lambda: GPT(**SIZES), straight(3), 1)
    for held in (model, copy.deepcopy(model)):
        with pytest.raises(
            ValueError, match=r"GPT is called as a whole, .* has stage 1 of 3 only: call engine\.train_"
        ):
            held(torch.zeros(1, 6, dtype=torch.long))
    message = (
        r"blocks\.3 \(TransformerBlock\) is on stage 2 \(pipeline rank 2\), but is called on rank 1: a PipelineBlock"
    )
    with pytest.raises(ValueError, match=message):
        model.blocks[3](torch.zeros(1, 6, 16))
    with pytest.raises(ValueError, match=r"blocks\.3\.mlp\.down \(Linear\) is on stage 2"):
        model.blocks[3].mlp.down(torch.zeros(1, 6, 64))


def test_only_its_own_part_is_ever_brought_to_life(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    value, draw = InitTrace.value, allocate.draw

    def noting(act: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def wrapped(*args: Any, **options: Any) -> Tensor:
            out = act(*args, **options)
            sizes.append(out.untyped_storage().nbytes())
            return out

        return wrapped

    monkeypatch.setattr(InitTrace, "value", noting(value))
    monkeypatch.setattr(allocate, "draw", noting(draw))

    def halves() -> nn.Module:
        plain, ours = nn.Linear(1600, 1600, bias=False), layers.Linear(1600, 1600, bias=False)
        return nn.Sequential(ours, plain, layers.Linear(1600, 1600, bias=False), nn.Linear(1600, 1600, bias=False))

    build(halves, ParallelContext(grid()))
    assert sum(sizes) == 4 * 1600 * 1600 * 4
    for rank in range(2):
        sizes.clear()
        stage_of(halves, straight(2), rank)
        assert sizes == [1600 * 1600 * 4] * 2
