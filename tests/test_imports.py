"""Imports run one way: from `cli` down to `context`, as `LEVELS` says and docs/architecture.md draws."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import colossus

PACKAGE = Path(colossus.__file__).parent

#: who may import whom: a room imports rooms of lower levels and itself, never a sibling on its own level
LEVELS = {
    "context": 0,
    "rows": 0,
    "comm": 1,
    "hardware": 2,
    "layout": 2,
    "checkpoint": 3,
    "server": 3,
    "construct": 3,
    "sequence_parallel": 3,
    "tensor_parallel": 3,
    "sharded_tensor": 4,
    "layers": 5,
    "schedule": 6,
    "models": 6,
    "data": 6,
    "gradients": 6,
    "optim": 6,
    "sparse": 7,
    "data_parallel": 8,
    "state": 9,
    "hf": 10,  # beside the engine, which reaches it through a registry
    "engine": 10,
    "convert": 11,
    "monitor": 11,
    "planner": 11,
    "launch": 12,
    "doctor": 12,
    "inference": 13,
    "verify": 14,
    "compare": 14,
    "cli": 15,
    "__main__": 16,
}
#: anyone may import these; they import only each other as listed
LEAVES = {
    "import_path": set(),
    "config_module": set(),
    "python_process": set(),
    "registry": {"import_path"},
    "_lazy": set(),
    "machine": set(),
    "progress": set(),
    "torch_versions": set(),
    "random": set(),
    "nest": set(),
    "arithmetic": set(),
    "picture": set(),
    "chart": {"picture"},
    "error_place": set(),
    "graphs": {"registry", "arithmetic", "config"},
    "config": {"registry", "import_path", "config_module", "_lazy", "arithmetic"},
}


def room_of(module: str) -> str:
    """``colossus.layers.linear`` -> ``layers``; the package itself is ``colossus``."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else parts[0]


def imported_modules(tree: ast.AST, module: str, is_package: bool) -> Iterator[tuple[int, str]]:
    """(line, absolute module name) of every import, however deep, but for TYPE_CHECKING blocks of a package's face."""
    skipped: set[ast.AST] = set()
    if is_package:
        for node in ast.walk(tree):
            if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
                skipped.update(child for statement in node.body for child in ast.walk(statement))
    for node in ast.walk(tree):
        if node in skipped:
            continue
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = module.split(".") if is_package else module.split(".")[:-1]
                package = parents[: len(parents) - (node.level - 1)]
                base = ".".join([*package, base] if base else package)
            yield node.lineno, base
            # `from colossus import layers` names a room, `from colossus.checkpoint import folder` a file
            yield from (
                (node.lineno, f"{base}.{alias.name}") for alias in node.names if base.split(".")[0] == "colossus"
            )
        elif isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            first = node.args[0] if node.args else None
            if name in ("import_module", "__import__") and isinstance(first, ast.Constant):
                yield node.lineno, str(first.value)


@cache
def imports_of(file: Path, package: Path) -> tuple[str, list[tuple[int, str]], list[tuple[int, str]]]:
    """The name of a module of the package in this folder, what it imports, and what of that inside of functions."""
    parts = file.relative_to(package.parent).with_suffix("").parts
    is_package = parts[-1] == "__init__"
    module = ".".join(parts[:-1] if is_package else parts)
    tree = ast.parse(file.read_text())
    return module, list(imported_modules(tree, module, is_package)), list(late_imports(tree))


def wrong_arrow(source: str, target: str) -> str | None:
    """Why a module of room ``source`` must not import room ``target``, or None when it may."""
    if source == target or target in ("registry", "_lazy"):
        return None
    if source == "colossus":
        return None if target in LEAVES else "the package itself is lazy and imports no room"
    if target in ("colossus", "__version__"):
        return None  # the bare package
    if source in LEAVES:
        return None if target in LEAVES[source] else f"{source} is a leaf"
    if target in LEAVES:
        return None
    for room in (source, target):
        if room not in LEVELS:
            return f"{room} has no level here: a new room (give it one), or a name of the lazy package"
    if LEVELS[target] < LEVELS[source]:
        return None
    return "siblings do not know each other" if LEVELS[target] == LEVELS[source] else f"{target} is above {source}"


def late_imports(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Imports inside a function."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            for child in ast.walk(node):
                if isinstance(child, ast.Import):
                    yield from ((child.lineno, alias.name) for alias in child.names)
                elif isinstance(child, ast.ImportFrom):
                    yield child.lineno, child.module or "."


def violations(package: Path) -> list[str]:
    lines = []
    for file in sorted(package.rglob("*.py")):
        module, imported, _ = imports_of(file, package)
        for line, target in imported:
            if target.split(".")[0] != "colossus":
                continue
            why = wrong_arrow(room_of(module), room_of(target))
            if why:
                lines.append(f"{file.relative_to(package.parent)}:{line} imports {target}: {why}")
    return lines


def test_no_arrow_runs_back() -> None:
    assert not (lines := violations(PACKAGE)), "\n".join(lines)


def test_no_circle_among_files() -> None:
    """Not even one of names that a type checker alone imports, but for the faces of packages."""
    files = dict(imports_of(file, PACKAGE)[:2] for file in PACKAGE.rglob("*.py"))
    imported = {
        module: {name for _, name in names} & files.keys() - {module, "colossus"} for module, names in files.items()
    }
    assert max(map(len, imported.values())) > 10
    try:
        tuple(TopologicalSorter(imported).static_order())
    except CycleError as error:
        pytest.fail(f"files that import each other: {' <- '.join(error.args[1])}")


#: names of files that several rooms have: the same idea in each
SHARED_NAMES = ("__init__.py", "options.py", "errors.py", "llama.py", "vit.py")


def test_files_are_small_and_no_two_have_one_name() -> None:
    by_name: dict[str, list[str]] = {}
    for file in sorted(PACKAGE.rglob("*.py")):
        path = str(file.relative_to(PACKAGE))
        num_lines = len(file.read_text().splitlines())
        assert num_lines <= 320, f"{path} has {num_lines} lines"
        by_name.setdefault(file.name, []).append(path)
    several = {name: paths for name, paths in by_name.items() if len(paths) > 1 and name not in SHARED_NAMES}
    assert not several


def test_every_room_has_a_level() -> None:
    rooms = {path.name for path in PACKAGE.iterdir() if path.is_dir() and (path / "__init__.py").exists()}
    assert rooms <= LEVELS.keys() | LEAVES.keys()


def test_only_heavy_things_are_imported_late() -> None:
    """A function-level import of our own rooms dodges a circle; commands may, as ``--help`` must be quick."""
    problems = []
    for file in sorted(PACKAGE.rglob("*.py")):
        room = file.relative_to(PACKAGE).parts[0]
        if room in ("cli", "launch", "verify", "compare", "inference", "doctor", "__main__.py"):
            continue
        _, _, late = imports_of(file, PACKAGE)
        problems += [
            f"{room}/{file.name}:{line} {name}" for line, name in late if name.split(".")[0] in ("colossus", "")
        ]
        if room in LEVELS:  # torch may be late in config, cli and launch only
            problems += [
                f"{room}/{file.name}:{line} {name}"
                for line, name in late
                if name.split(".")[0] == "torch" and name != "torch.utils.tensorboard"
            ]
    assert not problems, "\n".join(problems)


def test_no_public_name_is_hidden_by_a_module() -> None:
    """Importing the module would put it where the lazy name is."""
    for package in ("", "context", "engine", "layers", "layout", "config", "data", "models", "schedule"):
        module = importlib.import_module(".".join(filter(None, ("colossus", package))))
        folder = PACKAGE / package
        inside = {path.stem for path in folder.glob("*.py")} | {path.name for path in folder.iterdir() if path.is_dir()}
        assert not inside & set(getattr(module, "__all__", ())), package


PLANTED = {
    "comm/bad.py": ("from colossus.layers.linear import Linear", "comm/bad.py:1 imports colossus.layers.linear"),
    "context/late.py": (
        "def f():\n    from colossus.engine import engine",
        "context/late.py:2 imports colossus.engine",
    ),
    "layout/relative.py": ("from ..engine.engine import Engine", "layout/relative.py:1 imports colossus.engine.engine"),
    "models/sibling.py": ("import colossus.data.text", "models/sibling.py:1 imports colossus.data.text: siblings"),
    "registry.py": ("import colossus.config", "registry.py:1 imports colossus.config: registry is a leaf"),
    "context/string.py": (
        "import importlib\nimportlib.import_module('colossus.cli.main')",
        "string.py:2 imports colossus.cli",
    ),
}
ALLOWED = {
    "engine/a.py": "from colossus.layers import linear\nfrom colossus.config import schema\nimport colossus.context",
    "layers/b.py": "from colossus.layers import mlp\nfrom . import linear\nfrom .linear import Linear\nimport torch",
    "context/c.py": "from colossus.registry import TENSOR_MODES",
    "config/d.py": "from colossus._lazy import lazy_names\nfrom colossus.registry import MODELS",
    "cli/e.py": "from colossus import __version__\ndef f():\n    import torch\n    from colossus.launch import agent",
    "__init__.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from colossus.engine import initialize",
}


def fake_package(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / "colossus" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
    return root / "colossus"


@pytest.mark.parametrize("name", PLANTED)
def test_the_checker_sees_a_planted_arrow(tmp_path: Path, name: str) -> None:
    text, expected = PLANTED[name]
    lines = violations(fake_package(tmp_path, {name: text}))
    assert lines
    assert any(expected in line for line in lines), lines


def test_the_checker_allows_what_is_allowed(tmp_path: Path) -> None:
    assert violations(fake_package(tmp_path, ALLOWED)) == []


def test_light_modules_load_no_torch() -> None:
    """One process imports them one after the other and says which one brought torch in."""
    modes = [
        f"colossus.tensor_parallel.modes.{path.stem}"
        for path in (PACKAGE / "tensor_parallel" / "modes").glob("[!_]*.py")
    ]
    assert len(modes) >= 3
    graphs = [f"colossus.graphs.builtin.{path.stem}" for path in (PACKAGE / "graphs" / "builtin").glob("[!_]*.py")]
    assert len(graphs) >= 3
    light = [
        "colossus",
        "colossus.registry",
        "colossus.arithmetic",
        "colossus.chart",
        "colossus.config",
        "colossus.random",
        "colossus.context.grid",
        "colossus.data.sampler",
        "colossus.layout.layout",
        "colossus.layout.activation",
        "colossus.layout.moves",
        "colossus.comm.accounting",
        "colossus.hardware.measured",
        "colossus.hardware.data_sheets",
        "colossus.tensor_parallel.mode",
        "colossus.tensor_parallel.choose_sharding",
        "colossus.tensor_parallel.attention_heads",
        "colossus.tensor_parallel.traffic",
        "colossus.sequence_parallel.modes",
        *modes,
        "colossus.models.options",
        "colossus.checkpoint.weight_sources",
        "colossus.hf.hf_source",
        "colossus.hf.families",
        "colossus.schedule.actions",
        "colossus.schedule.simulate",
        "colossus.schedule.check",
        "colossus.schedule.build",
        "colossus.schedule.builtin",
        "colossus.schedule.bounds",
        "colossus.schedule.draw",
        "colossus.inference.config",
        "colossus.graphs.analysis",
        "colossus.graphs.graph_checks",
        *graphs,
        "colossus.compare.run_bench",
        "colossus.data_parallel.options.gossip_options",
        "colossus.monitor.hooks.options",
        "colossus.server.process",
        "colossus.cli.show",
        "colossus.cli.show_graph",
        "colossus.cli.plan",
        "colossus.cli.plot",
        "colossus.cli.main",
    ]
    code = f"""
import importlib, sys
for name in {light!r}:
    importlib.import_module(name)
    heavy = [m for m in ("torch",) if m in sys.modules]
    if heavy:
        sys.exit(f"importing {{name}} loads {{heavy}}")
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
