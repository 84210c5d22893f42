"""Short training runs under a plan, with everything about them that parity compares."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from helpers.covered import note_plans_in
from helpers.ranks import run_ranks
from torch import Tensor

import colossus
from colossus.state.model_state_dict import full_state_dict

SIZES: dict[str, Any] = dict(num_layers=2, hidden_size=24, num_heads=4, vocab_size=53, seq_len=12)
BATCH = 8


def batch_of(step: int, sizes: dict[str, Any] = SIZES, batch: int = BATCH) -> dict[str, Tensor]:
    """A global batch in which every sample has another number of valid tokens; of a ViT, images."""
    generator = torch.Generator().manual_seed(1000 + step)
    if "image_size" in sizes:
        shape = batch, sizes["in_channels"], *sizes["image_size"]
        images = torch.randn(shape, generator=generator, dtype=torch.float64)
        return {"inputs": images, "labels": torch.randint(0, sizes["num_classes"], (batch,), generator=generator)}
    ids = torch.randint(0, sizes["vocab_size"], (batch, sizes["seq_len"] + 1), generator=generator)
    labels = ids[:, 1:].clone()
    for row in range(batch):
        labels[row, : (row * 5 + step) % sizes["seq_len"]] = -100
    return {"inputs": ids[:, :-1], "labels": labels}


def config_of(plan: dict[str, Any], steps: int, precision: str, **more: Any) -> dict[str, Any]:
    config: dict[str, Any] = dict(
        parallel=plan,
        model=dict(type="GPT", **SIZES),
        optimizer=dict(type="AdamW", lr=1e-3, weight_decay=0.1),
        lr_schedule=dict(type="cosine", warmup_steps=20),
        train=dict(steps=steps, global_batch_size=BATCH, precision=precision, clip_grad_norm=1.0, seed=3),
        device="cpu",
    )
    for key, value in more.items():
        is_another = key == "model" and "type" in value
        config[key] = value if is_another else merged(config.get(key, {}), value)
    return config


def merged(old: Any, new: Any) -> Any:
    """Return ``new`` laid over ``old``; a bare number is the size of its section."""
    if not isinstance(new, dict):
        return new
    old = old if isinstance(old, dict) else {"size": old}
    return {**old, **{key: merged(old.get(key, {}), value) for key, value in new.items()}}


class Trace:
    """Losses, norms and tokens of every step, gradients at the first and last, weights at the start and the end; where
    asked for, before the last step."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.tokens: list[int] = []
        self.gradients: list[dict[str, Tensor]] = []
        self.start: dict[str, Tensor] = {}
        self.before_last: dict[str, Tensor] = {}
        self.end: dict[str, Tensor] = {}

    def __getstate__(self) -> dict[str, Any]:
        """A rank sends some hundred tensors: all of a state dict as one."""
        states = dict(start=self.start, before_last=self.before_last, end=self.end)
        return {
            **self.__dict__,
            "gradients": [packed(state) for state in self.gradients],
            **{name: packed(state) for name, state in states.items()},
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.gradients = [unpacked(*of_step) for of_step in state["gradients"]]
        for name in ("start", "before_last", "end"):
            setattr(self, name, unpacked(*state[name]))


def flat(state: dict[str, Tensor]) -> Tensor:
    """All numbers of a state dict of one dtype; integers, of buffers, become numbers of that."""
    assert len({value.dtype for value in state.values() if value.is_floating_point()}) < 2
    return torch.cat([value.detach().reshape(-1) for value in state.values()]) if state else torch.empty(0)


def packed(state: dict[str, Tensor]) -> tuple[list[tuple[str, torch.Size]], Any]:
    return [(name, value.shape) for name, value in state.items()], flat(state).cpu().numpy()


def unpacked(shapes: list[tuple[str, torch.Size]], numbers: Any) -> dict[str, Tensor]:
    parts = torch.from_numpy(numbers).split([shape.numel() for _, shape in shapes])
    return {name: part.view(shape) for (name, shape), part in zip(shapes, parts, strict=True)}


def train(
    rank: int,
    config: dict[str, Any],
    steps: int,
    damage: str | None = None,
    before_last: bool = False,
    only_end: bool = False,
    make_batch: Callable[..., dict[str, Any]] = batch_of,
) -> Trace:
    """Train on a rank, and gather what is compared.

    Args:
        rank: of this process.
        config: of the run.
        steps: to train.
        damage: a parameter whose gradient is halved.
        before_last: gather the weights before the last step, too.
        only_end: gather gradients and weights of the last step alone, and only on the first rank.
        make_batch: makes the global batch of a step, as `batch_of` does.
    """
    engine = colossus.initialize(config)
    trace = Trace()
    if not only_end:
        trace.start = full_state_dict(engine.model, engine.context)
    if damage is not None:
        dict(engine.model.named_parameters())[damage].register_hook(lambda grad: grad * 0.5)
    index, count = engine.context.index("data"), engine.context.size("data")
    whole, sizes = config["train"]["global_batch_size"], config["model"]
    part = whole // count
    for step in range(steps):
        if before_last and step == steps - 1:
            trace.before_last = full_state_dict(engine.model, engine.context)
        own = {key: value[index * part : (index + 1) * part] for key, value in make_batch(step, sizes, whole).items()}
        result = engine.train_step({key: value.to(engine.device) for key, value in own.items()})
        trace.losses.append(result.loss)
        trace.norms.append(result.grad_norm)
        trace.tokens.append(result.tokens)
        if step == steps - 1 or (step == 0 and not only_end):
            trace.gradients.append(full_state_dict(engine.model, engine.context, gradients=True))
    trace.end = full_state_dict(engine.model, engine.context)
    engine.close()
    if only_end and rank:
        trace.gradients, trace.end = [], {}
    return trace


def run_plan(world: int, config: dict[str, Any], steps: int, *more: Any) -> list[Trace]:
    """The ranks' traces; ``more`` are further arguments of `train`."""
    return run_ranks(world, train, config, steps, *more, with_context=False)


def scheduled(kind: str, microbatches: int = 4) -> dict[str, Any]:
    """Return the section of a schedule, as further sections of `config_of`."""
    return dict(schedule=dict(type=kind, microbatches=microbatches))


def run_cases(
    world: int, configs: dict[str, dict[str, Any]], steps: int, make_batch: Callable[..., dict[str, Any]] = batch_of
) -> dict[str, list[Trace]]:
    """`run_plan` of several configs on the same ranks, one after the other: name -> the ranks' traces."""

    def body(rank: int) -> list[Trace]:
        traces = []
        for name, config in configs.items():
            try:
                traces.append(train(rank, config, steps, make_batch=make_batch))
            except Exception as error:
                error.add_note(f"in the case {name!r}")
                raise
        return traces

    note_plans_in([configs])
    by_rank = run_ranks(world, body, with_context=False)
    return {name: [traces[number] for traces in by_rank] for number, name in enumerate(configs)}


_RUNS: dict[str, list[Trace]] = {}


def shared_run(world: int, config: dict[str, Any], steps: int) -> list[Trace]:
    """`run_plan`, once for all tests of a session that ask for the same; what it returns must not be changed."""
    note_plans_in([config])
    key = repr((world, config, steps))
    if key not in _RUNS:
        _RUNS[key] = run_plan(world, config, steps, None, True)
    return _RUNS[key]


def relative(value: float, reference: float) -> float:
    return abs(value - reference) / max(abs(reference), 1e-30)


def assert_same_run(trace: Trace, reference: Trace, *, loss: float, norm: float, parameter: float) -> None:
    """Contract 3: losses and norms of every step, and each parameter's gradient norm at the first and last step.

    A parameter whose true gradient is zero (a key bias: it shifts all scores of a query alike, which softmax ignores)
    is compared on the scale of the global norm, since its own norm is rounding noise.
    """
    for step, (mine, other) in enumerate(zip(trace.losses, reference.losses, strict=True)):
        assert relative(mine, other) <= loss, f"loss of step {step + 1}: {mine!r}, one process {other!r}"
    for step, (mine, other) in enumerate(zip(trace.norms, reference.norms, strict=True)):
        assert relative(mine, other) <= norm, f"gradient norm of step {step + 1}: {mine!r}, one process {other!r}"
    names = ("first", "last")[-len(reference.gradients) :]
    for when, mine_all, other_all in zip(names, trace.gradients, reference.gradients, strict=True):
        assert mine_all.keys() == other_all.keys()
        mine_norms = torch.stack(torch._foreach_norm([mine_all[name] for name in other_all]))
        other_norms = torch.stack(torch._foreach_norm(list(other_all.values())))
        gaps = (mine_norms - other_norms).abs() / other_norms.clamp(min=1e-3 * other_norms.norm().item())
        worst = int(gaps.argmax())
        assert gaps[worst] <= parameter, (
            f"{when} step, gradient norm of {list(other_all)[worst]} differs by {gaps[worst]:.3g} of itself"
        )


def assert_same_numbers(trace: Trace, reference: Trace) -> None:
    """In float64: the same start to the bit, and every element of every gradient and weight."""
    for name, value in reference.start.items():
        assert torch.equal(trace.start[name], value), f"{name} starts differently"
    end, wanted = (
        {name: value for name, value in state.items() if not is_key_bias(name)} for state in (trace.end, reference.end)
    )
    assert_close_states(end, wanted, "weight", atol=1e-10)
    for mine, other in zip(trace.gradients, reference.gradients, strict=True):
        assert_close_states(mine, other, "gradient", atol=1e-11)


def assert_close_states(mine: dict[str, Tensor], wanted: dict[str, Tensor], what: str, *, atol: float) -> None:
    """The same names, and each element; all at once, and one by one for the message."""
    assert mine.keys() == wanted.keys()
    same_shapes = all(mine[name].shape == value.shape for name, value in wanted.items())
    if same_shapes and torch.allclose(flat(mine), flat(wanted), rtol=1e-8, atol=atol):
        return
    for name, value in wanted.items():
        torch.testing.assert_close(mine[name], value, rtol=1e-8, atol=atol, msg=f"{what} of {name}")


def is_key_bias(name: str) -> bool:
    """Its true gradient is zero; Adam turns the rounding noise into steps of full size."""
    return name.endswith("qkv.key.bias")


def assert_is_plain_torch(
    trace: Trace,
    twin: torch.nn.Module,
    sizes: dict[str, Any],
    steps: int,
    batch_size: int = BATCH,
    make_batch: Callable[..., dict[str, Any]] = batch_of,
) -> None:
    """Losses, norms, gradients at the first and the last step, and the weights of a run of `config_of` in float64,
    against torch's own modules and loop.

    Args:
        twin: has the parameters by their logical names, and ``loss_sum(inputs, labels)``, to which further entries
            of a batch are passed, too.
    """
    twin.load_state_dict(trace.start)
    optimizer = torch.optim.AdamW(twin.parameters(), lr=0.0, weight_decay=0.1)
    for step in range(steps):
        batch = make_batch(step, sizes, batch_size)
        loss_sum, count = twin.loss_sum(*batch.values())
        optimizer.zero_grad()
        (loss_sum / count).backward()
        norm = torch.nn.utils.clip_grad_norm_(twin.parameters(), 1.0)
        assert relative(trace.losses[step], (loss_sum / count).item()) < 1e-10
        assert relative(trace.norms[step], norm.item()) < 1e-10
        if step in (0, steps - 1):
            gradients = trace.gradients[0 if step == 0 else 1]
            for name, parameter in twin.named_parameters():
                torch.testing.assert_close(
                    gradients[name], parameter.grad, rtol=1e-8, atol=1e-11, msg=f"gradient of {name}"
                )
        optimizer.param_groups[0]["lr"] = 1e-3 * (step + 1) / 20
        optimizer.step()
    for name, value in twin.state_dict().items():
        if not is_key_bias(name):
            torch.testing.assert_close(trace.end[name].to(value.dtype), value, rtol=1e-8, atol=1e-10, msg=name)
