"""The sections, in the order in which they are run: what the others rely on comes first, what takes long last."""

from __future__ import annotations

from benchmarks.gpu.section import Section

SECTIONS = (
    Section("device", "device", 5, "what the machine has, and whether it computes"),
    Section("layers", "layers", 20, "every layer in every dtype against the CPU in float64"),
    Section("staging", "staging", 10, "what ranks that share the device exchange goes through the host, in order"),
    Section("modes", "modes", 50, "every layer in every tensor mode, ranks on one device, against one process"),
    Section("plans", "plans", 60, "training under every kind of plan, ranks on one device, against one process"),
    Section("strategies", "strategies", 20, "what replicas exchange, on one device, against the same run on the CPU"),
    Section("tables", "tables", 15, "sparse gradients of tables, in each way"),
    Section("generation", "generation", 15, "text with a key/value cache: the CPU's tokens"),
    Section("loader", "loader", 5, "batches on the device: the CPU's, and no wait for them"),
    Section("nccl", "nccl", 15, "every call with one rank; plans, where there are several devices"),
    Section("launching", "launching", 30, "runs that are started, that hang, that run out of memory, and what is told"),
    Section("precisions", "precisions", 15, "bf16 and fp16 against fp32, loss scaling, steps that are not finite"),
    Section("waits", "waits", 15, "between two logging steps no step waits for what it has told the device"),
    Section("determinism", "determinism", 10, "the same bits twice"),
    Section("checkpoints", "checkpoints", 20, "saved from page-locked memory while training goes on, loaded back"),
    Section("memory", "memory", 10, "steps leave nothing behind, recomputation saves memory"),
    Section("feeding", "feeding", 20, "steps with a loader beside steps whose batch is on the device"),
    Section("kernels", "kernels", 25, "the attention of a ring and fused AdamW beside torch's own"),
    Section("step", "step", 110, "a training step in one process beside bare torch: time, MFU, memory"),
    Section("blocks", "blocks", 60, "the block of every tensor mode, ranks on one device, beside one process"),
)
