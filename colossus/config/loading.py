"""Loading: from a Python file or a dict, and overrides, to a checked `Config`."""

from __future__ import annotations

import ast
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from pydantic import ValidationError

from colossus.config.components import check_names, is_text
from colossus.config.errors import ConfigError, explain, unknown_key
from colossus.config.overrides import apply_overrides
from colossus.config.plans import resolve_sizes
from colossus.config.schema import Config
from colossus.config.section import Named
from colossus.config.sections import Weights
from colossus.config_module import module_name, put_on_path
from colossus.registry import MODEL_SOURCES, nearest

#: configs/ of the repository, which is a link here and a folder of the installed package
CONFIGS = Path(__file__).parents[1] / "configs"


def load_config(
    config: str | Path | Mapping[str, Any], overrides: Iterable[str] = (), nproc: int | None = None
) -> Config:
    """Return the resolved config of a file and overrides: `state_config`, then `resolve`.

    Args:
        config: path of a Python file whose top-level names are the sections, or a mapping of sections.
        overrides: ``section.key=value`` strings; they win over the file.
        nproc: number of processes of the whole run; None takes the product of the sizes.

    Raises:
        ConfigError: for everything that is wrong with the file, a key, a value or the plan.
    """
    return resolve(state_config(config, overrides), nproc)


def state_config(config: str | Path | Mapping[str, Any], overrides: Iterable[str] = ()) -> Config:
    """Run a config file and return what it and the overrides say, with ``name`` set.

    Raises:
        ConfigError: for everything that is wrong with the file, a key or the type of a value.
    """
    source = None if isinstance(config, Mapping) else Path(config).name
    with _named_in_errors(source):
        values = config if isinstance(config, Mapping) else read_file(Path(config))
        stated = validate(apply_overrides(values, overrides))
    if stated.name is None:
        stated = stated.model_copy(update={"name": Path(source).stem if source else "run"})
    stated._source = source
    return stated


def resolve(stated: Config, nproc: int | None = None, *, choose: Callable[[Config], Config] | None = None) -> Config:
    """Return the config with its names found, its options checked, and its plan fitted to the number of processes.

    Args:
        stated: what a file and overrides say.
        nproc: number of processes of the whole run; None takes the product of the sizes.
        choose: returns a config with a plan, for example of ``parallel.auto``, before sizes are checked; None refuses a
            config without a plan.

    Returns:
        The config, with ``parallel.data`` a number.

    Raises:
        ConfigError: for everything that is wrong with a name, a value or the plan.
    """
    with _named_in_errors(stated.source):
        config = resolve_model(stated)
        check_names(config)
        if choose is not None:
            config = choose(config)
        return resolve_sizes(config, nproc)


@contextmanager
def _named_in_errors(source: str | None) -> Iterator[None]:
    try:
        yield
    except ConfigError as error:
        # the cause stays attached, so that a traceback of the user's own file can still be printed
        raise ConfigError(error.problems, source) from error.__cause__


def validate(values: Mapping[str, Any]) -> Config:
    """Return a config of these sections.

    Raises:
        ConfigError: one problem per wrong key.
    """
    try:
        return Config.model_validate(dict(values))
    except ValidationError as error:
        raise ConfigError(f"{path}: {message}" for path, message in explain(error, Config).items()) from None


def read_file(path: Path) -> dict[str, Any]:
    """Run the file and return its sections.

    Modules beside the file can be imported, also later (`put_on_path`). Names with a leading underscore, imported
    names, modules, functions and classes are the file's own business; any other name that is no section is an error.
    """
    text = _read(path)
    try:
        tree = ast.parse(text, str(path))
        code = compile(tree, str(path), "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        line = f"line {error.lineno}: " if isinstance(error, SyntaxError) and error.lineno else ""
        reason = error.msg if isinstance(error, SyntaxError) else str(error)
        raise ConfigError(f"{line}{type(error).__name__}: {reason}") from error

    put_on_path(str(path.parent))
    # a real module, so that classes of the file can be inspected, and pickled for processes that import it
    module = ModuleType(module_name(path))
    module.__file__ = str(path.resolve())
    sys.modules[module.__name__] = module
    try:
        exec(code, module.__dict__)
    except (Exception, SystemExit) as error:
        raise ConfigError(_where(error, path)) from error
    return _sections(vars(module), tree)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        if "=" in path.name and not path.suffix == ".py":
            raise ConfigError("the config file comes first, overrides (section.key=value) after it") from None
        close = nearest(path.name, [file.name for file in path.parent.glob("*.py")])
        hint = f"; did you mean {close}?" if close else ""
        if not hint and (CONFIGS / path.name).exists():
            hint = f"; `colossus new DIR --from {path.stem}` writes this config of the package into a folder"
        raise ConfigError(f"no such file: {path}{hint}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot be read: {error}") from None


def _where(error: BaseException, path: Path) -> str:
    """Return the message of ``error`` with the line of the config file, and the line in another file that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame.lineno for frame in frames if frame.filename == str(path)]
    is_deeper = bool(own) and frames[-1].filename != str(path)
    below = f" (raised in {Path(frames[-1].filename).name}, line {frames[-1].lineno})" if is_deeper else ""
    reason = "the file called exit()" if isinstance(error, SystemExit) else str(error) or "no message"
    return f"{f'line {own[-1]}: ' if own else ''}{type(error).__name__}: {reason}{below}"


def _sections(namespace: Mapping[str, Any], tree: ast.Module) -> dict[str, Any]:
    assigned = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    sections = list(Config.model_fields)
    values, problems = {}, []
    for name, value in namespace.items():
        if name in sections:
            values[name] = value
        elif name in assigned and not (name.startswith("_") or callable(value) or isinstance(value, ModuleType)):
            message = unknown_key(name, sections, Config)
            problems.append(f"{name}: {message} (start the names of helpers with an underscore: _{name})")
    if problems:
        raise ConfigError(problems)
    return values


# -- models of another format, and their tokenizers -----------------------------------------------------------


def resolve_model(config: Config) -> Config:
    """Return the config with the model in the folder that ``model = dict(type="hf", path=...)`` names.

    It has the folder's weights, unless ``checkpoint.weights`` is set, and its tokenizer for text.

    Raises:
        ConfigError: if the source has no such model.
    """
    model, weights, tokenizer = config.model, config.checkpoint.weights, None
    if model is not None and isinstance(model.type, str) and model.type in MODEL_SOURCES:
        try:
            spec, path, tokenizer = MODEL_SOURCES.get(model.type)(model.options)
        except ValueError as error:
            raise ConfigError(f"model: {error}") from None
        model = Named(**spec)
        if path is not None and (weights is None or not weights.path):
            weights = Weights(path=path) if weights is None else weights.model_copy(update={"path": path})
    if weights is not None and not weights.path:
        raise ConfigError('checkpoint.weights.path: is missing; only model = dict(type="hf", path=...) implies it')
    checkpoint = config.checkpoint.model_copy(update={"weights": weights})
    config = config.model_copy(update={"model": model, "checkpoint": checkpoint})
    return config if tokenizer is None else with_tokenizer(config, tokenizer)


def with_tokenizer(config: Config, path: str) -> Config:
    """Return the config with a tokenizer for its text, and for that of ``data.validation``, where it names none.

    ``tokenizer="bytes"`` names one.

    Args:
        config: a config.
        path: path of the tokenizer.json, or of a folder with it.
    """
    data = config.data
    if not isinstance(data, Named):
        return config
    return config.model_copy(update={"data": Named(**_filled(data.spec(), path))})


def _filled(data: dict[str, Any], path: str) -> dict[str, Any]:
    filled, validation = dict(data), data.get("validation")
    if is_text(data["type"]) and data.get("tokenizer") is None:
        filled["tokenizer"] = path
    if isinstance(validation, Mapping) and "type" in validation:  # else it is this dataset with other options
        filled["validation"] = _filled(dict(validation), path)
    elif is_text(validation):
        filled["validation"] = {"type": validation, "tokenizer": path}
    return filled
