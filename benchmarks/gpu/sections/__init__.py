"""The sections, in the order in which they are run: what the others rely on comes first, what takes long last."""

from __future__ import annotations

from benchmarks.gpu.section import Section

SECTIONS = (Section("device", "device", 10, "what the machine has, and whether it computes"),)
