"""Constructors as people write them: what they compute from weights is what plain torch gives, swapped or not."""

from __future__ import annotations

import io
import math
import pickle
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.ranks import run_ranks
from torch import Tensor, nn

import colossus
from colossus.context.parallel_context import ParallelContext
from colossus.state.model_state_dict import full_state_dict


class Words(nn.Module):
    """Values without random numbers, so that plain torch's are the answer."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.linear, self.narrow = nn.Embedding(12, 8), nn.Linear(8, 8), nn.Linear(8, 4)
        self.head = nn.Linear(8, 12, bias=False)
        with torch.no_grad():
            for index, param in enumerate(self.parameters()):
                param.copy_((torch.arange(param.numel()) * (0.3 + index)).sin().view(param.shape))


CASES: dict[str, Callable[[Any], None]] = {}


def case(write: Callable[[Any], None]) -> Callable[[Any], None]:
    CASES[write.__name__] = write
    return write


@case
def crop(m: Any) -> None:
    m.words.weight = nn.Parameter(m.words.weight[:6])  # as nanoGPT does: num_embeddings stays
    m.linear.weight = nn.Parameter(m.linear.weight[:, :4])


@case
def crop_data(m: Any) -> None:
    m.words.weight.data = m.words.weight.data[:6]


@case
def grow(m: Any) -> None:
    old, table = m.words.weight, nn.Embedding(16, 8)
    with torch.no_grad():
        table.weight[:12].copy_(old)
        table.weight[12:] = old.mean(0)
    m.words = table


@case
def tie_after_growing(m: Any) -> None:
    rows = torch.from_numpy(np.ones((2, 8), dtype=np.float32))
    m.words = nn.Embedding.from_pretrained(torch.cat([m.words.weight, rows]), freeze=False)
    m.head = nn.Linear(8, 14, bias=False)
    m.head.weight = m.words.weight


@case
def like_a_weight(m: Any) -> None:
    weight = m.linear.weight
    m.narrow.bias = nn.Parameter(weight.new_tensor([1.0, 2.0, 3.0, 4.0]))
    m.register_buffer("of_old", weight.new([1.0, 2.0]) + weight.new(2).fill_(1.0) + weight.new_full((2,), 2.5))
    m.register_buffer("of_many", torch.tensor([weight[0, 0], weight[1, 1]]) + weight.new_tensor([weight[0, 1], 3.0]))


@case
def on_the_device_of_a_weight(m: Any) -> None:
    device = m.linear.weight.device
    assert device.type == "cpu"
    m.register_buffer("numbers", torch.tensor([1.0, 2.0], device=device) + torch.as_tensor([1.0, 2.0], device=device))
    m.register_buffer("counted", torch.arange(4, device=device) + torch.tensor(3, device=device))
    m.register_buffer("moved", torch.tensor([1.0, 2.0]).to(m.linear.weight) + m.narrow.bias[:2].to(device).detach())
    m.more = nn.Linear(2, 2, device=device, dtype=m.linear.weight.dtype)
    nn.init.ones_(m.more.weight)
    nn.init.ones_(m.more.bias)
    m.to(device)


@case
def moved_to_where_it_is(m: Any) -> None:
    m.linear.weight.data.cpu().mul_(2.0)  # itself: the weight is doubled
    m.narrow.weight.data.to("cpu").add_(1.0)
    m.head.weight.data = m.head.weight.detach().cpu() * 2


@case
def numbers_of_weights(m: Any) -> None:
    weight = m.linear.weight
    m.register_buffer("listed", torch.tensor(weight.tolist()))
    m.register_buffer("of_numpy", torch.tensor(weight.detach().numpy().sum(0)) + np.asarray(weight.data)[0])
    m.register_buffer("written", torch.tensor(float(f"{weight.mean():.4f}")))


@case
def data_of_other_memory(m: Any) -> None:
    values = torch.ones(12, 8)
    m.head.weight.data = values
    m.head.weight.data.mul_(2.0)
    values.add_(1.0)  # the same memory
    m.linear.weight.data = torch.from_numpy(np.full((8, 8), 2.0, dtype=np.float32))
    m.linear.bias = nn.Parameter(torch.zeros(8))
    m.linear.bias.data = m.narrow.bias.data.repeat(2)


@case
def parts_of_one(m: Any) -> None:
    for name, rows in zip("qkv", m.head.weight.chunk(3), strict=True):
        setattr(m, name, nn.Linear(8, 4, bias=False))
        getattr(m, name).weight = nn.Parameter(rows)
    del m.head
    torch.nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(m.parameters()) * 2, m.parameters())


@case
def factors(m: Any) -> None:
    u, s, vh = torch.linalg.svd(m.linear.weight.detach())
    m.down, m.up = nn.Linear(8, 3, bias=False), nn.Linear(3, 8, bias=False)
    m.down.weight.data, m.up.weight.data = s[:3].diag() @ vh[:3], u[:, :3]
    m.linear.weight.data -= m.up.weight.data @ m.down.weight.data
    m.narrow.weight.data.copy_(torch.linalg.qr(m.narrow.weight.detach().T)[0].T)


@case
def by_depth(m: Any) -> None:
    for index, (name, param) in enumerate(m.named_parameters()):
        if name.endswith("weight"):
            param.data *= 1 / math.sqrt(2 * (index + 1))
            param.data.mul_(torch.rsqrt(torch.tensor(2.0 * (index + 1))))


@case
def loaded(m: Any) -> None:
    state = {name: value.clone() + 1 for name, value in m.state_dict().items()}
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    m.load_state_dict(torch.load(file))
    m.linear.load_state_dict({"weight": torch.ones(8, 8), "bias": torch.zeros(8)}, assign=True)


@case
def pickled(m: Any) -> None:
    m.twin = pickle.loads(pickle.dumps(m.linear))


def made_by(write: Callable[[Any], None]) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        model = Words()
        write(model)
        return model

    return make


def wrong_cases(context: ParallelContext) -> dict[str, str]:
    """By case, which tensors are not those of plain torch, or why it is refused."""
    wrong = {}
    for name, write in CASES.items():
        make = made_by(write)
        state = make().state_dict()
        for kind, factory in {"as it is": make, "swapped": colossus.parallelize(make)}.items():
            try:
                built = full_state_dict(colossus.build(factory, context), context)
                differ = [key for key in state if not torch.allclose(built[key], state[key], rtol=0, atol=1e-6)]
                if differ or built.keys() != state.keys():
                    wrong[f"{name}, {kind}"] = f"{differ}, {built.keys() ^ state.keys()}"
            except Exception as error:
                wrong[f"{name}, {kind}"] = f"{type(error).__name__}: {error}"
    return wrong


def test_what_constructors_compute_is_as_in_plain_torch() -> None:
    assert run_ranks(2, wrong_cases) == [{}, {}]


def shared_data(m: Any) -> None:
    m.head.weight.data = m.words.weight.data


def frozen_table(m: Any) -> None:
    m.words = nn.Embedding.from_pretrained(m.head.weight)


def overlapping_parts(m: Any) -> None:
    m.linear.weight = nn.Parameter(m.head.weight.view(8, 12)[:, 2:10])


def test_memory_of_two_parameters_is_refused() -> None:
    def refusals(context: ParallelContext) -> list[str]:
        messages = []
        for write in (shared_data, frozen_table, overlapping_parts):
            with pytest.raises(ValueError, match="share memory, but are two parameters") as caught:
                colossus.build(colossus.parallelize(made_by(write)), context)
            messages.append(str(caught.value))
        return messages

    first, second, third = run_ranks(2, refusals)[0]
    assert first.startswith("head.weight and words.weight share memory")
    assert second.startswith("head.weight and words.weight")
    assert third.startswith("linear.weight and head.weight")
    assert "copy values" in first


def resized(folder: Path, vocab_size: int) -> Callable[[], nn.Module]:
    from transformers import AutoModelForCausalLM

    def make() -> nn.Module:
        model = AutoModelForCausalLM.from_pretrained(folder)
        model.resize_token_embeddings(vocab_size)
        return model

    return make


@pytest.mark.long
@pytest.mark.skipif(find_spec("transformers") is None, reason="scripts/test installs transformers")
def test_a_pretrained_model_is_resized(tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes: dict[str, Any] = dict(hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2)
    for tied in (True, False):
        config = AutoConfig.for_model("llama", vocab_size=11, tie_word_embeddings=tied, **sizes)
        AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / str(tied))

    def differences(context: ParallelContext) -> list[str]:
        differ = []
        for tied, vocab_size in ((True, 14), (False, 14), (True, 8), (False, 8)):
            make = resized(tmp_path / str(tied), vocab_size)
            state: dict[str, Tensor] = make().state_dict()
            built = full_state_dict(colossus.build(colossus.parallelize(make), context), context)
            # new rows are drawn
            differ += [name for name, value in state.items() if not torch.allclose(built[name][:11], value[:11])]
            differ += [name for name, value in state.items() if built[name].shape != value.shape]
        return differ

    assert run_ranks(2, differences) == [[], []]
