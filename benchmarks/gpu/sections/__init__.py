"""The sections, in the order in which they are run: what the others rely on comes first, what takes long last."""

from __future__ import annotations

from benchmarks.gpu.section import Section

SECTIONS = (
    Section("device", "device", 10, "what the machine has, and whether it computes"),
    Section("layers", "layers", 40, "every layer in every dtype against the CPU in float64"),
    Section("modes", "modes", 60, "every layer in every tensor mode, ranks on one device, against one process"),
    Section("plans", "plans", 90, "training under every kind of plan, ranks on one device, against one process"),
)
