"""Reference pages, from what the code itself says: config keys from the schema, commands from their parsers, the API
from public names and docstrings. ``conf.py`` calls it; the pages are not checked in."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import inspect
import io
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from colossus.cli import main as cli
from colossus.config.printed import all_keys
from colossus.config.schema import Config
from colossus.registry import DATASETS, GRAPHS, HOOKS, MODELS, OPTIMIZERS, STRATEGIES

#: page -> (title, what is on it, modules whose ``__all__`` is, more names)
API: dict[str, tuple[str, str, list[str], list[str]]] = {
    "colossus": ("colossus", "From a config to an engine, and models without one.", ["colossus"], []),
    "layers": (
        "colossus.layers",
        "Layers take the place of those of `torch.nn`. Shapes are global ones: what a rank holds of them depends on "
        "the plan.",
        ["colossus.layers"],
        [],
    ),
    "init": (
        "colossus.layers.init",
        "Initial values: what `init=` and `bias_init=` of a layer take.",
        ["colossus.layers.init"],
        [],
    ),
    "engine": (
        "colossus.engine",
        "`colossus.initialize` returns an `Engine`.",
        ["colossus.engine"],
        ["colossus.engine.checkpoints.Checkpoints"],
    ),
    "checkpoint": ("colossus.checkpoint", "Checkpoints without an engine.", ["colossus.checkpoint"], []),
    "data": ("colossus.data", "Datasets and loaders.", ["colossus.data"], []),
    "server": ("colossus.server", "Parameter servers in a loop of your own.", ["colossus.server"], []),
    "inference": ("colossus.inference", "Text from a trained model.", ["colossus.inference"], []),
    "hf": ("colossus.hf", "Model folders of Hugging Face.", ["colossus.hf"], []),
    "extending": (
        "Base classes for extensions",
        "What a pipeline schedule, a data-parallel strategy or a graph of your own is made of.",
        [],
        [
            "colossus.schedule.actions.Action",
            "colossus.data_parallel.strategy.Strategy",
            "colossus.data_parallel.per_replica.PerReplica",
            "colossus.graphs.graph_family.GraphFamily",
        ],
    ),
}


def write(folder: Path) -> None:
    """All pages, into a folder."""
    pages = {"index.md": _index(), "config.md": _config(), "options.md": _options(), "command-line.md": _commands()}
    pages |= {f"{page}.md": _api(*about) for page, about in API.items()}
    folder.mkdir(exist_ok=True)
    for name, text in pages.items():
        path = folder / name
        if not path.exists() or path.read_text() != text:  # Sphinx reads anew what is newer than the last build
            path.write_text(text)


def _index() -> str:
    api = "\n".join(f"{page}" for page in API)
    return f"""\
# Reference

All pages of this section are generated from the code.

```{{toctree}}
:caption: Configuration
:maxdepth: 1

config
options
command-line
```

```{{toctree}}
:caption: Python
:maxdepth: 1

{api}
```
"""


# -- config ---------------------------------------------------------------------------------------------------------


def _config() -> str:
    sections = [
        "# Config keys",
        "Every key of a config file. `colossus config FILE --help KEY` prints the same, with the options of the model "
        "and strategy of that file. A bare number where a section is expected sets its size; a bare name sets its "
        "`type`. Options of [models, data, optimizers, strategies, hooks and graphs](options.md) have their own page.",
        "## Top level",
    ]
    for parent, rows in _grouped(all_keys(section=Config)).items():
        if parent:
            sections.append(f"{'#' * (2 + parent.count('.'))} `{parent}`")
        sections.append(_table(rows))
    return "\n\n".join(sections) + "\n"


def _options() -> str:
    sections = [
        "# Models, data, optimizers, strategies, hooks, graphs",
        "## Models",
        'Options of `model = dict(type="...")`.',
    ]
    for name in MODELS.names():
        sections += [f"### `{name}`", *_of(MODELS.options(name))]
    for title, key, registry in (("Data", "data", DATASETS), ("Optimizers", "optimizer", OPTIMIZERS)):
        sections += [f"## {title}", f'Options of `{key} = dict(type="...")`.']
        for name in registry.names():
            sections += [f"### `{name}`", *_of(registry.options(name))]
    sections += [
        "## Strategies",
        'Options of `parallel.strategy = dict(type="...")`. What each does: [](../strategies.md).',
    ]
    for name in STRATEGIES.names():
        sections += [f"### `{name}`", *_of(STRATEGIES.options(name))]
    sections += ["## Hooks", 'Options of `hooks = [dict(type="...")]`. What each does: [](../hooks.md).']
    for name in HOOKS.names():
        sections += [f"### `{name}`", *_of(HOOKS.options(name))]
    sections += [
        "## Graphs",
        'Of `parallel.strategy.graph`: a name, or `dict(type="...", **options)`.',
    ]
    for name in GRAPHS.names():
        graph = GRAPHS.get(name)
        options = [p for p in inspect.signature(graph).parameters.values() if p.kind is not p.VAR_KEYWORD]
        sections += [f"### `{name}`", inspect.cleandoc(graph.__doc__ or "").replace("``", "`")]
        if options and graph.__init__ is not object.__init__:
            sections += ["Options: " + ", ".join(f"`{option.name}={option.default!r}`" for option in options) + "."]
    return "\n\n".join(sections) + "\n"


def _of(options: type[BaseModel]) -> Iterator[str]:
    if options.__doc__ and options.__doc__ != BaseModel.__doc__:
        yield inspect.cleandoc(options.__doc__).replace("``", "`")
    groups = _grouped(all_keys(section=options))
    for parent, rows in groups.items():
        if parent:
            yield f"Keys of `{parent}`:"
        yield _table(rows)
    if not groups:
        yield "No options."


def _grouped(keys: Iterable[tuple[str, str, str]]) -> dict[str, list[str]]:
    """Section -> a row of a table for each of its keys."""
    groups: dict[str, list[str]] = {}
    for key, kind, meaning in keys:
        kind, _, default = kind.partition(", by default ")
        cells = [f"`{key}`", kind + (f"; default `{default}`" if default else ""), meaning.replace("``", "`")]
        groups.setdefault(key.rpartition(".")[0], []).append("| " + " | ".join(map(_escaped, cells)) + " |")
    return groups


def _table(rows: list[str]) -> str:
    return "\n".join(["| key | value | meaning |", "|---|---|---|", *rows])


def _escaped(cell: str) -> str:
    """Return the text as a cell of a Markdown table."""
    return cell.replace("|", "\\|").replace("<", "\\<").replace("**", "\\*\\*")


# -- command line ---------------------------------------------------------------------------------------------------


def _commands() -> str:
    sections = ["# Command line", "`colossus COMMAND --help` prints the same."]
    for command in cli.COMMANDS:
        if command != "checkpoint":
            sections += _command([command])
    for command in ("inspect", "verify", "diff", "convert"):
        sections += _command(["checkpoint", command])
    return "\n\n".join(sections) + "\n"


def _command(words: list[str]) -> Iterator[str]:
    parser = _parser_of(words)
    width, os.environ["COLUMNS"] = os.environ.get("COLUMNS"), "100"
    usage = parser.format_usage().removeprefix("usage: ").rstrip()
    os.environ.pop("COLUMNS") if width is None else os.environ.update(COLUMNS=width)
    yield f"## `colossus {' '.join(words)}`"
    yield (parser.description or "").replace("\n\n  --", "\n\n- --").replace("\n  --", "\n- --")
    yield f"```text\n{usage}\n```"
    rows = []
    for action in parser._actions:
        if action.dest == "help":
            continue
        metavar = action.metavar or (f"{{{','.join(action.choices)}}}" if action.choices else "")
        name = ", ".join(action.option_strings)
        takes_value = action.nargs != 0 and metavar
        title = f"{name} {metavar}".strip() if takes_value else name or str(action.dest)
        meaning = _escaped((action.help or "") % {"default": action.default}).replace("\n", " ")
        rows.append(f"| `{title}` | {meaning} |")
    yield "\n".join(["| argument | |", "|---|---|", *rows])
    if parser.epilog:
        yield f"```text\n{parser.epilog.strip()}\n```"


class _Found(Exception):
    """Raised in the place of printing help."""


def _parser_of(words: list[str]) -> argparse.ArgumentParser:
    """The parser that a command makes, caught where it would print its help."""
    parsers: list[argparse.ArgumentParser] = []

    def print_help(parser: argparse.ArgumentParser, file: Any = None) -> None:
        parsers.append(parser)
        raise _Found

    original, argparse.ArgumentParser.print_help = argparse.ArgumentParser.print_help, print_help  # type: ignore[assignment]
    try:
        with contextlib.suppress(_Found), contextlib.redirect_stdout(io.StringIO()):
            cli.main([*words, "--help"])
    finally:
        argparse.ArgumentParser.print_help = original  # type: ignore[method-assign]
    return parsers[0]


# -- API ------------------------------------------------------------------------------------------------------------


def _api(title: str, about: str, modules: list[str], more: list[str]) -> str:
    names = [f"{module}.{name}" for module in modules for name in importlib.import_module(module).__all__]
    entries = [_entry(name) for name in [*names, *more]]
    return "\n\n".join([f"# {title}", about, "```{eval-rst}", "\n\n".join(entries), "```"]) + "\n"


def _entry(name: str) -> str:
    module, _, attribute = name.rpartition(".")
    value = getattr(importlib.import_module(module), attribute)
    if inspect.isclass(value):
        return f".. autoclass:: {name}\n   :members:"
    return f".. {'autofunction' if callable(value) else 'autodata'}:: {name}"
