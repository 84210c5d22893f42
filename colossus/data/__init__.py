"""Datasets, the order in which samples are read, and the loaders the engine calls."""

from typing import TYPE_CHECKING

from colossus._lazy import lazy_names

if TYPE_CHECKING:
    from colossus.data.batch import Microbatches
    from colossus.data.documents.chat import Chat
    from colossus.data.documents.columns import HuggingFaceDataset, Parquet
    from colossus.data.documents.encoder import Text
    from colossus.data.documents.jsonl import Jsonl
    from colossus.data.documents.packed import Packed
    from colossus.data.documents.row_source import BadRow, Piece, RowSource
    from colossus.data.documents.tars import WebDataset
    from colossus.data.documents.text_rows import StdlibFiles, TextFiles
    from colossus.data.documents.token_documents import MegatronDocuments, PreparedDocuments, TokenFileDocuments
    from colossus.data.images import Digits
    from colossus.data.loader import Loader, Loaders
    from colossus.data.make_loaders import build_loaders
    from colossus.data.mix import Mix
    from colossus.data.text import PythonStdlib, TextFolder
    from colossus.data.text_pairs import collate_pairs
    from colossus.data.tokens import BatchedDataset, TokenFile, TokenWindows, TooLittleData
    from colossus.data.words import PythonStdlibWords

__all__ = [
    "BadRow",
    "BatchedDataset",
    "Chat",
    "Digits",
    "HuggingFaceDataset",
    "Jsonl",
    "Loader",
    "Loaders",
    "MegatronDocuments",
    "Microbatches",
    "Mix",
    "Packed",
    "Parquet",
    "Piece",
    "PreparedDocuments",
    "PythonStdlib",
    "PythonStdlibWords",
    "RowSource",
    "StdlibFiles",
    "Text",
    "TextFiles",
    "TextFolder",
    "TokenFile",
    "TokenFileDocuments",
    "TokenWindows",
    "TooLittleData",
    "WebDataset",
    "build_loaders",
    "collate_pairs",
]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "BadRow": "documents.row_source",
        "BatchedDataset": "tokens",
        "Chat": "documents.chat",
        "Digits": "images",
        "HuggingFaceDataset": "documents.columns",
        "Jsonl": "documents.jsonl",
        "Loader": "loader",
        "Loaders": "loader",
        "MegatronDocuments": "documents.token_documents",
        "Microbatches": "batch",
        "Mix": "mix",
        "Packed": "documents.packed",
        "Parquet": "documents.columns",
        "Piece": "documents.row_source",
        "PreparedDocuments": "documents.token_documents",
        "PythonStdlib": "text",
        "PythonStdlibWords": "words",
        "RowSource": "documents.row_source",
        "StdlibFiles": "documents.text_rows",
        "Text": "documents.encoder",
        "TextFiles": "documents.text_rows",
        "TextFolder": "text",
        "TokenFile": "tokens",
        "TokenFileDocuments": "documents.token_documents",
        "TokenWindows": "tokens",
        "TooLittleData": "tokens",
        "WebDataset": "documents.tars",
        "build_loaders": "make_loaders",
        "collate_pairs": "text_pairs",
    },
)
