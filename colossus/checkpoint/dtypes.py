"""The dtypes that a checkpoint can hold, by torch's names. No torch."""

from __future__ import annotations

#: bytes of an element, and what safetensors calls it; complex numbers are stored as their real and imaginary parts
_TABLE = {
    "float64": (8, "F64"),
    "float32": (4, "F32"),
    "float16": (2, "F16"),
    "bfloat16": (2, "BF16"),
    "float8_e4m3fn": (1, "F8_E4M3"),
    "float8_e5m2": (1, "F8_E5M2"),
    "complex128": (16, "F64"),
    "complex64": (8, "F32"),
    "int64": (8, "I64"),
    "int32": (4, "I32"),
    "int16": (2, "I16"),
    "int8": (1, "I8"),
    "uint64": (8, "U64"),
    "uint32": (4, "U32"),
    "uint16": (2, "U16"),
    "uint8": (1, "U8"),
    "bool": (1, "BOOL"),
}
ITEM_BYTES = {name: num_bytes for name, (num_bytes, _) in _TABLE.items()}
CODES = {name: code for name, (_, code) in _TABLE.items()}
