"""Datasets, the order in which samples are read, and the loaders the engine calls."""

from typing import TYPE_CHECKING

from colossus._lazy import lazy_names

if TYPE_CHECKING:
    from colossus.data.images import Digits
    from colossus.data.loader import Loader, Loaders
    from colossus.data.make_loaders import build_loaders
    from colossus.data.text import PythonStdlib, TextFolder
    from colossus.data.tokens import BatchedDataset, TokenFile, TokenWindows, TooLittleData
    from colossus.data.words import PythonStdlibWords

__all__ = [
    "BatchedDataset",
    "Digits",
    "Loader",
    "Loaders",
    "PythonStdlib",
    "PythonStdlibWords",
    "TextFolder",
    "TokenFile",
    "TokenWindows",
    "TooLittleData",
    "build_loaders",
]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "BatchedDataset": "tokens",
        "Digits": "images",
        "Loader": "loader",
        "Loaders": "loader",
        "PythonStdlib": "text",
        "PythonStdlibWords": "words",
        "TextFolder": "text",
        "TokenFile": "tokens",
        "TokenWindows": "tokens",
        "TooLittleData": "tokens",
        "build_loaders": "make_loaders",
    },
)
