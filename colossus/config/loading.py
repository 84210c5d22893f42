"""From a Python file (or a dict) and overrides to a checked `Config`."""

from __future__ import annotations

import ast
import difflib
import re
import sys
import traceback
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from pydantic import ValidationError

from colossus.config.errors import ConfigError, explain, paths_elsewhere, unknown_key
from colossus.config.model_source import resolve_model
from colossus.config.overrides import apply_overrides
from colossus.config.plans import check_names, resolve_sizes
from colossus.config.schema import Config


def load_config(
    config: str | Path | Mapping[str, Any], overrides: Iterable[str] = (), nproc: int | None = None
) -> Config:
    """Run a config file, lay the overrides over it, validate it and fit it to the number of processes.

    Args:
        config: path of a Python file whose top-level names are the sections, or a mapping of sections.
        overrides: ``section.key=value`` strings; they win over the file.
        nproc: number of processes of the whole run; None takes the product of the sizes.

    Returns:
        The config, with ``parallel.data`` a number and ``name`` set.

    Raises:
        ConfigError: for everything that is wrong with the file, a key, a value or the plan.
    """
    source = None if isinstance(config, Mapping) else Path(config).name
    try:
        values = config if isinstance(config, Mapping) else read_file(Path(config))
        overrides = list(overrides)
        loaded = validate(apply_overrides(values, overrides), overrides)
        if loaded.name is None:
            loaded = loaded.model_copy(update={"name": Path(source).stem if source else "run"})
        loaded = resolve_model(loaded)
        check_names(loaded)
        loaded = resolve_sizes(loaded, nproc)
    except ConfigError as error:
        # The cause stays attached, so that a traceback of the user's own file can still be printed.
        raise ConfigError(error.problems, source) from error.__cause__
    loaded._source = source
    return loaded


def validate(values: Mapping[str, Any], overrides: Iterable[str] = ()) -> Config:
    """The schema's view of ``values``.

    Raises:
        ConfigError: one problem per wrong key; those that come from an override say so.
    """
    try:
        return Config.model_validate(dict(values))
    except ValidationError as error:
        given = {text.partition("=")[0] for text in overrides}
        lines = []
        for path, message in explain(error, Config, elsewhere=paths_elsewhere(Config)).items():
            typed = any(path == key or path.startswith(f"{key}.") for key in given)
            lines.append(f"{path}: {message}{' (given on the command line)' if typed else ''}")
    raise ConfigError(lines)


def read_file(path: Path) -> dict[str, Any]:
    """Run the file and return its sections.

    The file's folder goes to the front of ``sys.path``, as when Python runs a script, so modules beside it can be
    imported, also later. Names with a leading underscore, imported names, modules, functions and classes are the
    file's own business; any other name that is no section is an error.
    """
    text = _read(path)
    try:
        tree = ast.parse(text, str(path))
        code = compile(tree, str(path), "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        line = f"line {error.lineno}: " if isinstance(error, SyntaxError) and error.lineno else ""
        reason = error.msg if isinstance(error, SyntaxError) else str(error)
        raise ConfigError(f"{line}{type(error).__name__}: {reason}") from error

    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    # A real module, so that classes of the file can be pickled and inspected.
    module = ModuleType("colossus_config_" + re.sub(r"\W", "_", path.stem))
    module.__file__ = str(path.resolve())
    sys.modules[module.__name__] = module
    try:
        exec(code, module.__dict__)
    except (Exception, SystemExit) as error:
        raise ConfigError(_where(error, path)) from error
    return _sections(vars(module), tree)


def _read(path: Path) -> str:
    if path.is_dir():
        raise ConfigError(f"is a folder, not a config file ({path}){_nearby(path, '')}")
    try:
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        if "=" in path.name and not path.suffix == ".py":
            raise ConfigError("the config file comes first, overrides (section.key=value) after it") from None
        raise ConfigError(f"no such file: {path}{_nearby(path.parent, path.name)}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot be read: {error}") from None


def _nearby(folder: Path, wanted: str, most: int = 5) -> str:
    if not folder.is_dir():
        return f"; there is no folder {folder}"
    here = sorted(item.name for item in folder.glob("*.py"))
    close = difflib.get_close_matches(wanted, here, n=most, cutoff=0.4) or here[:most]
    more = f" and {len(here) - len(close)} more" if len(here) > len(close) else ""
    return f"; Python files in {folder}: {', '.join(close)}{more}" if here else f"; {folder} has no Python files"


def _where(error: BaseException, path: Path) -> str:
    """The line of the config file in which ``error`` was raised, and where below that if it was deeper."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [number for number, frame in enumerate(frames) if frame.filename == str(path)]
    at = f"line {frames[own[-1]].lineno}: " if own else ""
    deeper = own and own[-1] < len(frames) - 1
    below = f" (raised in {Path(frames[-1].filename).name}, line {frames[-1].lineno})" if deeper else ""
    reason = str(error) or "no message"
    if isinstance(error, SystemExit):
        reason = "the file called exit()"
    return f"{at}{type(error).__name__}: {reason}{below}"


def _sections(namespace: Mapping[str, Any], tree: ast.Module) -> dict[str, Any]:
    imported = _imported(tree)
    known = list(Config.model_fields)
    values, problems = {}, []
    for name, value in namespace.items():
        if name in known:
            values[name] = value
        elif not (name.startswith("_") or name in imported or callable(value) or isinstance(value, ModuleType)):
            message = unknown_key(name, name, known, paths_elsewhere(Config))
            problems.append(f"{name}: {message} (start the names of helpers with an underscore: _{name})")
    if problems:
        raise ConfigError(problems)
    return values


def _imported(tree: ast.Module) -> set[str]:
    """Names that the file's import statements bind."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
            if isinstance(node, ast.ImportFrom) and node.names[0].name == "*":
                module = sys.modules.get(node.module or "")
                names |= set(vars(module)) if module else set()
    return names
