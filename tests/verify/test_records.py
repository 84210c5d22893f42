"""Records of loops of other frameworks beside the same loop in one process."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from colossus.cli.main import main
from colossus.context.local_ranks import run_local_ranks
from colossus.verify import record

BATCH, STEPS = 8, 2


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.up = nn.Linear(6, 10)
        self.down = nn.Linear(10, 6)
        self.norm = nn.LayerNorm(6)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        x = self.norm(x + self.down(F.gelu(self.up(x))))
        return x @ self.embedding.weight.T if isinstance(x, Tensor) else x


def make_model() -> Model:
    torch.manual_seed(0)
    return Model().double()


def batch_of(step: int) -> Tensor:
    return torch.randint(0, 11, (BATCH, 5), generator=torch.Generator().manual_seed(step))


def loop(model: nn.Module, samples: slice, folder: Path, *, clips: bool = True) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    with record(folder, model, steps=STEPS) as recording:
        for step in range(STEPS + 1):  # one more than is recorded
            ids = batch_of(step)[samples]
            logits = model(ids)
            loss = F.cross_entropy(logits.flatten(0, 1), ids.roll(-1, 1).flatten())
            recording.loss(loss, ids.numel())
            loss.backward()
            if clips:
                nn.utils.clip_grad_norm_(model.parameters(), 100.0)
            optimizer.step()
            optimizer.zero_grad()
        assert recording.is_done


def part_of_batch(rank: int, world: int) -> slice:
    return slice(rank * BATCH // world, (rank + 1) * BATCH // world)


def ddp(folder: Path, rank: int) -> None:
    loop(DistributedDataParallel(make_model()), part_of_batch(rank, 2), folder)


def fsdp(folder: Path, rank: int) -> None:
    model = make_model()
    mesh = init_device_mesh("cpu", (2,))
    for layer in (model.up, model.down):
        fully_shard(layer, mesh=mesh)
    loop(fully_shard(model, mesh=mesh), part_of_batch(rank, 2), folder)


def tensor_parallel(folder: Path, rank: int) -> None:
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    model = parallelize_module(make_model(), init_device_mesh("cpu", (2,)), plan)
    loop(model, slice(None), folder, clips=False)  # torch's clipping refuses DTensors beside plain tensors


def stages(folder: Path, rank: int) -> None:
    """Two pipeline ranks, each with a module of its own that calls its layer ``layer``."""

    class Stage(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(rank)
            self.layer = nn.Linear(4, 4).double()

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x)

    stage = Stage()
    optimizer = torch.optim.SGD(stage.parameters(), 0.1)
    with record(folder, stage, steps=1, names={"layer": f"layers.{rank}"}):
        x = torch.ones(2, 4, dtype=torch.float64) if rank == 0 else torch.empty(2, 4, dtype=torch.float64)
        if rank == 1:
            dist.recv(x, 0)
            x.requires_grad_()
            stage(x).square().sum().backward()
            dist.send(x.grad, 0)
        else:
            y = stage(x)
            dist.send(y.detach(), 1)
            gradient = torch.empty_like(y)
            dist.recv(gradient, 1)
            y.backward(gradient)
        optimizer.step()


LOOPS = {"ddp": ddp, "fsdp": fsdp, "tensor parallel": tensor_parallel}


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reference") / "one"
    loop(make_model(), slice(None), folder)
    return folder


@pytest.mark.parametrize("name", LOOPS)
def test_a_right_loop_agrees(reference: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    run_local_ranks(2, partial(LOOPS[name], tmp_path / "run"))
    assert main(["verify", str(tmp_path / "run"), str(reference)]) == 0, capsys.readouterr().out
    out = capsys.readouterr().out
    assert "(2 ranks)" in out
    assert "over 2 steps, up to rounding in float64" in out
    assert "gradients                 14" in out
    assert "losses                     2" in out
    shapes = {}
    with safe_open(tmp_path / "run" / "step-00001-rank-00001.safetensors", "pt") as file:
        for key in file.keys():  # noqa: SIM118
            shapes[key] = list(file.get_tensor(key).shape)
    is_whole = [10, 6] in shapes.values()
    assert is_whole == (name == "ddp"), shapes  # ranks write their parts


def test_stages_have_names_of_the_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_local_ranks(2, partial(stages, tmp_path / "run"))
    layers = nn.ModuleList()
    for rank in range(2):
        torch.manual_seed(rank)
        layers.append(nn.Linear(4, 4).double())
    model = nn.Module()
    model.layers = layers
    model.forward = lambda x: layers[1](layers[0](x))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with record(tmp_path / "one", model, steps=1):
        model(torch.ones(2, 4, dtype=torch.float64)).square().sum().backward()
        optimizer.step()
    assert main(["verify", str(tmp_path / "run"), str(tmp_path / "one")]) == 0, capsys.readouterr().out
    assert "gradients                  4" in capsys.readouterr().out


def test_a_loop_by_hand_tells_its_values(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, folder = nn.Linear(3, 2), tmp_path / "run"
    with record(folder, model) as recording:
        model(torch.ones(4, 3)).sum().backward()
        recording.gradients()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad
        recording.norm(torch.tensor(2.0))
    assert main(["verify", str(folder), str(folder)]) == 3
    assert "the loop clips by 2, the recorded gradients have 11.31" in capsys.readouterr().out


def test_what_cannot_be_compared(reference: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Linear(3, 2)
    with record(tmp_path / "none", model):
        pass
    assert main(["verify", str(tmp_path / "none"), str(reference)]) == 2
    assert "none: no step was recorded: no optimizer of torch stepped in its block" in capsys.readouterr().err
    assert main(["verify", str(tmp_path), str(reference)]) == 2
    assert f"colossus: {tmp_path}: no record (files step-00000-rank-00000.safetensors" in capsys.readouterr().err
    assert main(["verify", str(reference)]) == 2
    assert "name the one that is taken as right behind it" in capsys.readouterr().err
    with pytest.raises(FileExistsError, match="has a record already"), record(tmp_path / "none", model):
        pass
    with record(tmp_path / "loss", model) as recording, pytest.raises(ValueError, match="no forward of the recorded"):
        recording.loss(1.0)


def test_hooks_and_clipping_are_torchs_again_after_it(tmp_path: Path) -> None:
    model, clip = nn.Linear(3, 2), nn.utils.clip_grad_norm_
    with record(tmp_path / "run", model, steps=1):
        assert nn.utils.clip_grad_norm_ is not clip
    assert nn.utils.clip_grad_norm_ is clip
    assert nn.utils.clip_grad.clip_grad_norm_ is clip
    assert not model._forward_hooks
    assert not model._forward_pre_hooks


# -- loops that nobody here wrote -----------------------------------------------------------------------------


def hugging_face_model() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    sizes = dict(n_layer=1, n_embd=8, n_head=2, vocab_size=11, n_positions=5)
    return GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0))  # type: ignore[arg-type]


def labels_of(ids: Tensor) -> Tensor:
    """Return the ids without the first, which is no label: the Trainer divides by the number of all labels."""
    return torch.cat((torch.full_like(ids[:, :1], -100), ids[:, 1:]), 1)


def samples() -> list[dict[str, Tensor]]:
    ids = torch.cat([batch_of(step) for step in range(STEPS)])
    return [{"input_ids": row, "labels": labels} for row, labels in zip(ids, labels_of(ids), strict=True)]


def plain_loop(folder: Path, microbatches: int = 1, wrong: bool = False) -> None:
    model = hugging_face_model()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, weight_decay=0.0)
    with record(folder, model, steps=STEPS):
        for step in range(STEPS):
            for ids in batch_of(step).chunk(microbatches):
                loss = model(input_ids=ids, labels=labels_of(ids)).loss
                (loss if wrong else loss / microbatches).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()


def trainer_loop(folder: Path) -> None:
    """Transformers' Trainer, on accelerate, as it is."""
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(
        str(folder.parent / "out"), per_device_train_batch_size=BATCH // 2, gradient_accumulation_steps=2,
        learning_rate=1e-2, lr_scheduler_type="constant", max_grad_norm=0.5, num_train_epochs=1, report_to=[],
        use_cpu=True, save_strategy="no", train_sampling_strategy="sequential", dataloader_num_workers=0,
    )  # fmt: skip
    model = hugging_face_model()
    trainer = Trainer(model, arguments, train_dataset=samples())  # type: ignore[arg-type]
    with record(folder, model, steps=STEPS):
        trainer.train()


@pytest.mark.long
def test_transformers_trainer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain_loop(tmp_path / "one")
    trainer_loop(tmp_path / "trainer")
    assert main(["verify", str(tmp_path / "trainer"), str(tmp_path / "one")]) == 0, capsys.readouterr().out
    plain_loop(tmp_path / "wrong", 2, wrong=True)
    assert main(["verify", str(tmp_path / "wrong"), str(tmp_path / "trainer")]) == 3
    assert "2 times the reference: the number of forwards of a step" in capsys.readouterr().out


def accelerate_loop(folder: Path, rank: int) -> None:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)  # what this process has from before the fork
    accelerator = Accelerator(cpu=True)
    model = hugging_face_model()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, weight_decay=0.0)
    model, optimizer = accelerator.prepare(model, optimizer)
    with record(folder, model, steps=STEPS):
        for step in range(STEPS):
            ids = batch_of(step)[part_of_batch(rank, 2)]
            accelerator.backward(model(input_ids=ids, labels=labels_of(ids)).loss)
            accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.long
def test_accelerate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain_loop(tmp_path / "one")
    variables = {"MASTER_ADDR": "127.0.0.1", "LOCAL_WORLD_SIZE": "2"}
    run_local_ranks(2, partial(accelerate_loop, tmp_path / "run"), variables=variables)
    assert main(["verify", str(tmp_path / "run"), str(tmp_path / "one")]) == 0, capsys.readouterr().out
