"""Folders of ``torch.distributed.checkpoint`` as weights: FSDP2, torchtitan and Lightning save in this format."""

from __future__ import annotations

from colossus.checkpoint.dcp_folder import METADATA, read_dcp
from colossus.checkpoint.weight_sources import WeightFormat

DISTRIBUTED_CHECKPOINT = WeightFormat(
    title="a folder of torch.distributed.checkpoint",
    recognises=lambda path: (path / METADATA).is_file(),
    read=read_dcp,
    reader="colossus.checkpoint.dcp_reader:DCPReader",
)
