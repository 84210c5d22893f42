"""Logits in parts with a key/value cache, and the text that follows, under every plan: those of plain torch."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
import torch
from helpers.inference import LENGTH, MODELS, ids_of, plain, save
from helpers.ranks import run_ranks
from torch import Tensor

from colossus.config.plans import world_size
from colossus.inference import Sampling, generate, load_model
from colossus.inference.config import WeightSource, generation_config
from colossus.inference.decoding import Decoding
from colossus.layers.kv_cache import KeyValueCache
from colossus.sequence_parallel.mask import CAUSAL

#: the sizes of the parts: a prompt, single tokens, some at once, across the size at which there is more room
PARTS = (3, 1, 4, 1, 1, 2)
PROMPTS = ([3, 1, 4, 1, 5], [9], [2, 6, 5])
#: tokens by which the cache grows
MORE = 4
SAMPLING = Sampling(temperature=0.9, top_k=30, top_p=0.95, seed=7)

PLANS = {
    "one": [],
    "1d": ["parallel.tensor=2"],
    "pipeline": ["parallel.pipeline=2"],
    "data": ["parallel.data=2"],
    "2d": ["parallel.tensor=dict(mode='2d',size=4)"],
    "3d_2x1x2": ["parallel.tensor=dict(mode='3d',shape=(2,1,2))"],
    "pipeline_1d": ["parallel.pipeline=2", "parallel.tensor=2"],
    "2.5d": ["parallel.tensor=dict(mode='2.5d',size=8,depth=2)"],
    "pipeline_2d": ["parallel.pipeline=2", "parallel.tensor=dict(mode='2d',size=4)"],
    "all": ["parallel.data=2", "parallel.pipeline=2", "parallel.tensor=2"],
}


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, WeightSource]:
    return {name: save(tmp_path_factory.mktemp(name), model) for name, model in MODELS.items()}


def in_parts(source: WeightSource, overrides: list[str]) -> dict[str, Any]:
    """Of a rank: logits of its rows computed in parts, and where they lie; what is held; the text."""
    model = load_model(source, overrides=overrides)
    try:
        assert model.can_cache
        assert not any(param.requires_grad for param in model.module.parameters())
        vocab = source.manifest.config["model"]["vocab_size"]
        ids = ids_of(2 * model.row_multiple, vocab)
        cache = KeyValueCache()
        parts, start = [], 0
        for size in PARTS:
            parts.append(model.logits(ids[:, start : start + size], cache, only_last=False))
            start += size
        assert start == LENGTH
        last = model.logits(ids)
        rows = model.rows(len(ids))
        return dict(
            rows=(rows.start, rows.stop),
            logits=None if parts[0] is None else torch.cat([part for part in parts if part is not None], 1).numpy(),
            last=None if last is None else last.numpy(),
            held=cache.num_bytes,
            text=generate(model, PROMPTS, max_tokens=7, sampling=SAMPLING),
        )
    finally:
        model.close()


@pytest.fixture(autouse=True)
def little_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("colossus.layers.kv_cache._MORE", MORE)


def run_plans(rank: int, sources: dict[str, WeightSource], plans: dict[str, list[str]]) -> Any:
    torch.set_grad_enabled(True)
    return {(name, plan): in_parts(source, plans[plan]) for name, source in sources.items() for plan in plans}


def check(sources: dict[str, WeightSource], plans: dict[str, list[str]]) -> None:
    by_world: dict[int, dict[str, list[str]]] = defaultdict(dict)
    for plan, overrides in plans.items():
        by_world[world_size(generation_config(sources["gpt"], overrides).parallel)][plan] = overrides
    twins = {name: plain(source, MODELS[name]) for name, source in sources.items()}
    texts = {name: in_parts(source, [])["text"] for name, source in sources.items()}
    for world, of_world in by_world.items():
        ranks = run_ranks(world, run_plans, sources, of_world, with_context=False)
        for name, plan in ranks[0]:
            answers = [answer[name, plan] for answer in ranks]
            assert {str(answer["text"]) for answer in answers} == {str(texts[name])}, f"{name}, {plan}: another text"
            compare(answers, twins[name], f"{name}, {plan}")
            check_memory(answers, name, plan)


def compare(answers: list[dict[str, Any]], twin: torch.nn.Module, what: str) -> None:
    """Every row on some rank, and on each rank right."""
    seen: set[int] = set()
    ids = ids_of(max(answer["rows"][1] for answer in answers), twin.options.vocab_size)  # type: ignore[union-attr, arg-type]
    with torch.no_grad():
        wanted: Tensor = twin(ids)
    assert wanted.std() > 0.5, "logits that hardly differ would hide a wrong one"
    for answer in answers:
        if answer["logits"] is None:
            continue
        start, stop = answer["rows"]
        seen |= set(range(start, stop))
        gap = (torch.from_numpy(answer["logits"]) - wanted[start:stop]).abs().amax((0, 2)) / wanted.abs().amax()
        assert gap.max() <= 1e-12, f"{what}: relative difference by position {gap.tolist()}"
        last = (torch.from_numpy(answer["last"])[:, 0] - wanted[start:stop, -1]).abs().max() / wanted.abs().amax()
        assert last <= 1e-12, f"{what}: of the last token alone {last}"
    assert seen == set(range(len(ids))), f"{what}: rows {seen} of {len(ids)} were computed"


def check_memory(answers: list[dict[str, Any]], name: str, plan: str) -> None:
    """2 x layers x rows x key/value heads of the rank x room x head_dim numbers, and not one more."""
    model, size = MODELS[name], 8
    ways = {"1d": 2, "pipeline_1d": 2}.get(plan)
    if ways is None and plan not in ("one", "pipeline", "data"):
        return
    kv = model.get("num_kv_heads", model["num_heads"])
    heads = max(1, kv // (ways or 1))
    stages = 2 if "pipeline" in plan else 1
    room = -(-LENGTH // MORE) * MORE
    numbers = 2 * heads * (model["hidden_size"] // model["num_heads"])
    if "latent" in model:  # and one rotary key, whatever the number of heads
        numbers = model["latent"]["kv_rank"] + model["latent"]["rope_dim"]
    for answer in answers:
        elements = (model["num_layers"] // stages) * 2 * room * numbers
        assert answer["held"] == elements * size, f"{name}, {plan}"


@pytest.mark.long
def test_parts_equal_whole_forwards_under_every_plan(sources: dict[str, WeightSource]) -> None:
    check(sources, PLANS)


def test_a_ragged_batch_is_what_its_rows_are_alone(sources: dict[str, WeightSource]) -> None:
    for source in sources.values():
        model = load_model(source)
        greedy = Sampling(greedy=True)
        together = generate(model, PROMPTS, max_tokens=5, sampling=greedy)
        assert together == [generate(model, [prompt], max_tokens=5, sampling=greedy)[0] for prompt in PROMPTS]
        assert [len(tokens) for tokens in together] == [5, 5, 5]
        model.close()


def test_rows_end_by_themselves(sources: dict[str, WeightSource]) -> None:
    """A row that has ended changes nothing of the others."""
    model = load_model(sources["llama"])
    free = generate(model, PROMPTS, max_tokens=9, sampling=SAMPLING)
    stop = free[0][3]
    decoding = Decoding(model, PROMPTS, max_tokens=9, sampling=SAMPLING, stop=[stop])
    while not decoding.is_done:
        decoding.step()
    for prompt, tokens, whole in zip(PROMPTS, decoding.tokens, free, strict=True):
        cut = whole[: whole.index(stop) + 1] if stop in whole else whole
        assert tokens[len(prompt) :] == cut
    assert decoding.ended[0] == "stop"
    assert set(decoding.ended) <= {"stop", "max_tokens"}
    model.close()


def test_learned_positions_end_a_text(sources: dict[str, WeightSource]) -> None:
    """All positions are used: the last token is chosen behind the last of them."""
    model = load_model(sources["gpt"])
    decoding = Decoding(model, PROMPTS, max_tokens=100)
    while not decoding.is_done:
        decoding.step()
    assert decoding.ended == ["positions"] * 3
    assert [len(tokens) for tokens in decoding.tokens] == [LENGTH + 1] * 3
    assert decoding.cache is not None
    assert decoding.cache.num_tokens == LENGTH
    with pytest.raises(ValueError, match=r"prompt 2 has 13 tokens, the model has learned 12 positions"):
        Decoding(model, [[1], [1] * 13])
    model.close()


def test_an_attention_that_is_called_twice_in_a_forward_is_refused() -> None:
    attention, cache = torch.nn.Identity(), KeyValueCache()
    cache.attend(attention, *torch.ones(3, 1, 1, 2, 4), CAUSAL)
    with pytest.raises(ValueError, match="every attention must be called once in each forward"):
        cache.attend(attention, *torch.ones(3, 1, 1, 2, 4), CAUSAL)


def test_logits_that_are_no_numbers_are_told(sources: dict[str, WeightSource]) -> None:
    model = load_model(sources["gpt"])
    with torch.no_grad():
        model.module.get_parameter("norm.weight").fill_(float("nan"))
    for greedy in (True, False):
        with pytest.raises(FloatingPointError, match="prompt 1 after 2 tokens are not numbers"):
            generate(model, [[1, 2]], sampling=Sampling(greedy=greedy))
    model.close()
