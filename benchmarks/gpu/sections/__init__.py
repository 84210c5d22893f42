"""The sections, in the order in which they are run: what the others rely on comes first, what takes long last."""

from __future__ import annotations

from benchmarks.gpu.section import Section

SECTIONS = (
    Section("device", "device", 10, "what the machine has, and whether it computes"),
    Section("layers", "layers", 40, "every layer in every dtype against the CPU in float64"),
    Section("staging", "staging", 25, "what ranks that share the device exchange goes through the host, in order"),
    Section("modes", "modes", 60, "every layer in every tensor mode, ranks on one device, against one process"),
    Section("plans", "plans", 90, "training under every kind of plan, ranks on one device, against one process"),
    Section("strategies", "strategies", 30, "what replicas exchange, on one device, against the same run on the CPU"),
    Section("nccl", "nccl", 20, "every call with one rank; plans, where there are several devices"),
    Section("precisions", "precisions", 25, "bf16 and fp16 against fp32, loss scaling, steps that are not finite"),
    Section("waits", "waits", 25, "no step waits for the device between two logging steps"),
    Section("determinism", "determinism", 20, "the same bits twice"),
    Section("checkpoints", "checkpoints", 40, "saved from page-locked memory while training goes on, loaded back"),
    Section("streams", "streams", 10, "memory that crosses streams is not given away early"),
    Section("memory", "memory", 15, "steps leave nothing behind, recomputation saves memory"),
    Section("kernels", "kernels", 40, "the attention of a ring and fused AdamW beside torch's own"),
    Section("step", "step", 150, "a training step in one process beside bare torch: time, MFU, memory"),
    Section("blocks", "blocks", 90, "the block of every tensor mode, ranks on one device, beside one process"),
)
