"""Names of sources of documents in configs: of rows, of encoders of rows, of documents of token ids."""

from colossus.registry import Registry

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
