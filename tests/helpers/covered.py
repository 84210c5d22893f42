"""What a run of tests covered: of each law the tests that passed, and the levels of features that their runs had."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatch
from typing import Any

#: law -> the files of its tests, under tests/
LAWS: dict[str, tuple[str, ...]] = {
    "parity with one process": (
        "test_parity.py", "test_examples.py", "test_finetune.py", "test_outside_models.py",
        "data_parallel/test_zero*.py",
        "layers/test_moe_parity.py", "layers/test_samples.py", "models/test_plans.py", "engine/test_pipeline*.py",
        "engine/test_dropout_plans.py", "engine/test_precision.py", "engine/test_optimizer_parity.py",
        "engine/test_activation_checkpoint_plans.py", "engine/test_experts.py", "engine/test_late_gradients.py",
        "sequence_parallel/test_training.py", "sequence_parallel/test_tokens.py", "convert/test_forward_chain.py",
        "convert/test_pairs.py", "convert/test_config_models.py", "hf/test_parity.py", "optim/*.py", "sparse/*.py",
        "tensor_parallel/test_few_kv_heads.py", "verify/*.py",
    ),
    "a run goes on bit for bit": (
        "checkpoint/test_exact_resume.py", "checkpoint/test_resume*.py", "checkpoint/test_own_*.py",
        "checkpoint/test_strategy_state.py", "data/test_resumed_data.py", "launch/test_resume.py",
        "launch/test_restart*.py", "monitor/test_resumed.py", "engine/test_restart_from_memory.py",
    ),
    "from any plan to any plan": (
        "checkpoint/test_plans.py", "checkpoint/test_whole_state_dicts.py", "checkpoint/test_replica_checkpoints.py",
        "checkpoint/test_load_weights.py", "launch/test_fewer_processes.py", "launch/test_regrouping.py",
    ),
    "bytes as the formulas say": (
        "comm/test_accounting.py", "tensor_parallel/test_traffic.py", "tensor_parallel/test_modes.py",
        "planner/test_plan_check.py", "planner/test_fake_step.py", "sequence_parallel/test_attention.py",
    ),
    "nothing grows": ("test_steady.py", "checkpoint/test_bounds.py"),
    "errors in words": (
        "launch/test_bad_configs.py", "launch/test_failures.py", "launch/test_machine_limits.py",
        "cli/test_exit_codes.py",
        "engine/test_told_in_words.py", "engine/test_refusals_name_the_place.py", "layers/test_split_refusals.py",
        "config/*.py",
    ),
}  # fmt: skip


def law_of(path: str) -> str:
    """Return the law that the tests of a file under tests/ prove."""
    return next((law for law, files in LAWS.items() if any(fnmatch(path, file) for file in files)), "all else")


#: of the test that runs now: the levels of features that its runs had
_noted: set[tuple[str, str]] = set()


def note_plan(config: Any) -> None:
    """Note the features of a config of some ranks, for the report of what was covered."""
    _noted.update(features_of(config))


def note_plans_in(values: Iterable[Any]) -> None:
    """Note the features of each config among some arguments, or in a dict or a list of them."""
    for value in values:
        if isinstance(value, Mapping):
            if isinstance(value.get("parallel"), Mapping):
                note_plan(value)
            else:
                note_plans_in(value.values())
        elif isinstance(value, (list, tuple)):
            note_plans_in(value)


def noted() -> list[tuple[str, str]]:
    """Return what was noted since the last call."""
    levels = sorted(_noted)
    _noted.clear()
    return levels


def features_of(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield (feature, level) of a config's plan."""
    plan, schedule, train = (_section(config, name) for name in ("parallel", "schedule", "train"))
    tensor, sequence, zero = (_section(plan, name) for name in ("tensor", "sequence", "zero"))
    if tensor.get("size", 1) != 1 or "shape" in tensor:
        yield "tensor", str(tensor.get("mode", "1d")) + " sharded" * bool(tensor.get("sequence_sharded"))
    if _section(plan, "pipeline").get("size", 1) != 1:
        yield "pipeline", str(getattr(schedule.get("type", "1f1b"), "__name__", schedule.get("type", "1f1b")))
    if plan.get("data", 1) != 1:
        stage = zero.get("stage", zero.get("size", 0))
        strategy = _section(plan, "strategy").get("type", _section(plan, "strategy").get("size"))
        yield "data", f"zero {stage}" if stage else str(strategy or "all-reduce")
    if sequence.get("size", 1) != 1:
        yield "sequence", str(sequence.get("mode", "chosen"))
    if plan.get("expert", 1) != 1:
        yield "experts", "spread"
    if "weights" in tensor:
        yield "weights", str(tensor["weights"])
    kind = train.get("activation_checkpoint") or _section(config, "model").get("activation_checkpoint", "none")
    if kind != "none":
        yield "recompute", str(kind.get("type") if isinstance(kind, Mapping) else kind)
    precision = train.get("precision", "fp32")
    yield "precision", str(precision if isinstance(precision, str) else "mixed")


def _section(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return a section; a bare value is its size."""
    value = config.get(name, {})
    return value if isinstance(value, Mapping) else {"size": value}


def report(covered: Iterable[tuple[str, list[tuple[str, str]]]]) -> list[str]:
    """Return a line of each law and feature: the tests that passed, and how many of them had each level.

    Args:
        covered: the law and the levels of each test that passed.
    """
    tests = Counter[str]()
    levels: dict[str, Counter[tuple[str, str]]] = defaultdict(Counter)
    for law, of_test in covered:
        tests[law] += 1
        levels[law].update(tuple(level) for level in of_test)
    lines = []
    for law, count in sorted(tests.items()):
        lines.append(f"{law}: {count} tests")
        for feature in sorted({feature for feature, _ in levels[law]}):
            entries = sorted((level, number) for (name, level), number in levels[law].items() if name == feature)
            lines.append(f"  {feature}: " + ", ".join(f"{level} {number}" for level, number in entries))
    return lines
