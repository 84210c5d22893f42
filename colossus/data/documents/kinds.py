"""Names of sources of documents in configs: of rows, of encoders of rows, of documents of token ids."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from colossus.config.components import option_problems
from colossus.config.section import Named
from colossus.registry import Registry

_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)

DOCUMENTS = Registry(
    "source of documents",
    {
        "Chat": "colossus.data.documents.chat:Chat",
        "HuggingFaceDataset": "colossus.data.documents.columns:HuggingFaceDataset",
        "Jsonl": "colossus.data.documents.jsonl:Jsonl",
        "MegatronDocuments": "colossus.data.documents.token_documents:MegatronDocuments",
        "Parquet": "colossus.data.documents.columns:Parquet",
        "PreparedDocuments": "colossus.data.documents.token_documents:PreparedDocuments",
        "StdlibFiles": "colossus.data.documents.text_rows:StdlibFiles",
        "Text": "colossus.data.documents.encoder:Text",
        "TextFiles": "colossus.data.documents.text_rows:TextFiles",
        "TokenFileDocuments": "colossus.data.documents.token_documents:TokenFileDocuments",
        "WebDataset": "colossus.data.documents.tars:WebDataset",
    },
)


def call_with_options(
    kind: Any, options: Mapping[str, Any], defaults: Mapping[str, Any], key: str, registry: Registry = DOCUMENTS
) -> Any:
    """Return ``kind(**options)``.

    Args:
        kind: a class or function.
        options: its options in a config.
        defaults: further arguments: it receives those that it has, are not None, and are not in the options.
        key: key of the config, for messages.
        registry: the registry of its kind.

    Raises:
        ValueError: if ``kind`` does not have an option, or lacks one that it needs.
    """
    names = [name for name, parameter in parameters_of(kind).items() if parameter.kind in _NAMED]
    arguments = {name: value for name, value in defaults.items() if name in names and value is not None} | dict(options)
    problems = option_problems(key, Named(type=kind, **arguments), registry)
    for name in names:
        if parameters_of(kind)[name].default is inspect.Parameter.empty and name not in arguments and not problems:
            problems = [f"{key}: {getattr(kind, '__name__', type(kind).__name__)} needs {name!r}: set {key}.{name}"]
    if problems:
        raise ValueError("; ".join(problems))
    return kind(**arguments)


def parameters_of(kind: Any) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of a callable, by name."""
    try:
        return inspect.signature(kind).parameters
    except (TypeError, ValueError):  # some built-ins have no signature
        return {}


def make_source(spec: Mapping[str, Any], defaults: Mapping[str, Any], key: str) -> Any:
    """Return what ``dict(type=.., **options)`` makes; see `call_with_options`.

    Raises:
        ValueError: if there is no such source, or its options do not fit.
    """
    options = dict(spec)
    kind = options.pop("type", None)
    kind = DOCUMENTS.get(kind) if isinstance(kind, str) else kind
    if not callable(kind):
        raise ValueError(f"{key} needs a 'type': dict(type=.., **options); known: {', '.join(DOCUMENTS.names())}")
    return call_with_options(kind, options, defaults, key)
