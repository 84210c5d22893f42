"""Several ranks on one device, joined by gloo: what they exchange goes through the host, and the run stays the same.

Values are those of CPU tensors that take themselves for ones of a device (`helpers.on_host`); that no tensor of a
device meets gloo, and no copy of the host a tensor of a device, is seen on devices that do not exist.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import on_host
from helpers.fake_cuda import batch_on_device, run_fake_ranks
from helpers.ranks import run_ranks
from helpers.training import BATCH, batch_of, config_of, train
from torch import Tensor
from torch import distributed as dist
from torch.utils._pytree import tree_leaves

import colossus
from colossus import torch_versions
from colossus.comm import links, shared_memory
from colossus.config import ConfigError, load_config
from colossus.context import groups
from colossus.context.world import choose_backend, pick_device
from colossus.launch.checks import check_devices
from colossus.state.model_state_dict import full_state_dict

PLANS: dict[str, dict[str, Any]] = {
    "data 2, tensor 2": dict(data=2, tensor=2),
    "2d": dict(tensor=dict(mode="2d", size=4)),
    "zero 3": dict(data=2, zero=3, tensor=dict(size=2, sequence_sharded=True)),
    "zero 1, ring": dict(data=2, zero=1, sequence=dict(size=2, mode="ring")),
    "ulysses": dict(data=2, sequence=dict(size=2, mode="ulysses")),
    "pipeline": dict(data=2, pipeline=2),
    "hierarchical": dict(data=4, strategy=dict(type="hierarchical", hosts=2)),
    "powersgd": dict(data=4, strategy=dict(type="all_reduce", compress="powersgd", start_step=1)),
}


def configs() -> dict[str, dict[str, Any]]:
    by_name = {}
    for name, plan in PLANS.items():
        schedule = dict(schedule=dict(type="1f1b", microbatches=2)) if "pipeline" in plan else {}
        by_name[name] = config_of(plan, 2, "fp32", **schedule)
    by_name["selective"] = config_of(dict(tensor=4), 2, "bf16", train=dict(activation_checkpoint="selective"))
    return by_name


#: of the plans, those that are run by default
SHORT = ("zero 3", "pipeline")


def both_ways(rank: int, by_name: dict[str, dict[str, Any]]) -> list[str]:
    """Names of plans whose runs differ."""
    plain = {name: train(rank, config, 2) for name, config in by_name.items()}
    staged = on_host.pretend()
    different = []
    for name, config in by_name.items():
        before = staged.copies
        trace = train(rank, config, 2)
        assert staged.copies > before, name
        same = trace.losses == plain[name].losses and trace.norms == plain[name].norms
        same &= all(torch.equal(value, plain[name].end[key]) for key, value in trace.end.items())
        different += [] if same else [name]
    return different


@pytest.mark.parametrize("is_short", [True, pytest.param(False, marks=pytest.mark.long)])
def test_a_run_through_the_host_is_the_same_to_the_bit(is_short: bool) -> None:
    by_name = {name: config for name, config in configs().items() if (name in SHORT) is is_short}
    assert run_ranks(4, both_ways, by_name, with_context=False) == [[]] * 4


COLLECTIVES = ("all_reduce", "all_gather_single", "reduce_scatter_single", "all_to_all_single", "broadcast")


def watched(called: set[str], backend: str) -> None:
    """From here on fake ranks take themselves for ones of a backend: c10d raises at a tensor that gloo (on the CPU) or
    nccl (on CUDA) does not take."""
    wanted = "cpu" if backend == "gloo" else "cuda"

    plain = groups.AxisGroup.__post_init__

    def post_init(self: groups.AxisGroup) -> None:
        plain(self)
        self.is_on_host = self.process_group is not None and backend == "gloo"

    def owner(name: str) -> Any:
        return torch_versions if hasattr(torch_versions, name) else dist

    def watch(name: str) -> Any:
        real = getattr(owner(name), name)

        def call(*args: Any, **options: Any) -> Any:
            tensors = [getattr(x, "tensor", x) for x in tree_leaves((args, options))]
            devices = {x.device.type for x in tensors if isinstance(x, Tensor)}
            assert devices == {wanted}, f"{name} of tensors on {devices}"
            called.add(name)
            return real(*args, **options)

        return call

    groups.AxisGroup.__post_init__ = post_init  # type: ignore[method-assign]
    shared_memory.map_segments = links.map_segments = lambda *_: None  # as between hosts
    for name in (*COLLECTIVES, "batch_isend_irecv"):
        setattr(owner(name), name, watch(name))
    # not in `dist`, which asks of a batch's operations whether they are these functions
    links.dist = SimpleNamespace(isend=watch("isend"), irecv=watch("irecv"), Work=dist.Work)  # type: ignore[attr-defined]


def on_fake_devices(rank: int, by_name: dict[str, dict[str, Any]], backend: str) -> set[str]:
    called: set[str] = set()
    watched(called, backend)
    for config in by_name.values():
        engine = colossus.initialize({**config, "device": "cuda"})
        index, count = engine.context.index("data"), engine.context.size("data")
        part = BATCH // count
        batch = batch_on_device({key: x[index * part : (index + 1) * part] for key, x in batch_of(0).items()})
        engine.train_step(batch)
        full_state_dict(engine.model, engine.context)
        engine.close()
    return called


@pytest.mark.long
@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_a_backend_is_given_tensors_of_its_device_alone(backend: str) -> None:
    by_name = configs()
    # not the ring: its attention is one operation for torch, and inside of it fake tensors have no device
    others = {name: by_name[name] for name in ("2d", "zero 3", "ulysses")}
    if backend == "nccl":
        others["offload"] = config_of(dict(data=2, zero=dict(stage=2, offload=True), tensor=2), 2, "fp16")
        others["average"] = config_of(dict(data=2, tensor=2, strategy=dict(type="local_sgd", period=1)), 2, "fp32")
    (called,) = run_fake_ranks(4, on_fake_devices, others, backend)
    assert called >= {"all_reduce", "all_gather_single", "reduce_scatter_single", "all_to_all_single"}
    pipeline = {**by_name["pipeline"], "parallel": dict(pipeline=2)}
    first, last = run_fake_ranks(2, on_fake_devices, {"pipeline": pipeline}, backend, ranks=(0, 1))
    assert first & last >= {"isend", "irecv"}


def test_which_backend_joins_which_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    def config(device: str, backend: str) -> Any:
        return load_config(config_of(dict(data=1), 1, "fp32", device=device, comm=dict(backend=backend)))

    with pytest.raises(ConfigError, match=r"comm.backend = 'nccl' joins CUDA devices, but device = 'cpu'"):
        check_devices(config("cpu", "nccl"), 1)
    with pytest.raises(ConfigError, match=r"comm.backend = 'nccl' joins CUDA devices, but torch finds none here"):
        check_devices(config("auto", "nccl"), 1)
    assert choose_backend("auto", "cuda") == "nccl"
    assert choose_backend("gloo", "cuda") == choose_backend("auto", "cpu") == "gloo"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setenv("LOCAL_RANK", "3")
    check_devices(config("auto", "nccl"), 1)
    assert pick_device("auto", "gloo") == torch.device("cuda", 1)  # local ranks take turns
    with pytest.raises(ValueError, match=r"local rank 3 has no CUDA device: 2 CUDA devices .*'gloo'"):
        pick_device("auto", "auto")
