"""Llama 3 8B (2407.21783, table 3): 32 layers, 8 key/value heads, 8,192 tokens, a vocabulary of 128,256.

    colossus plan benchmarks/papers/llama3_8b.py --devices 64 --hosts 8 --hardware a100

The plan below is torchtitan's on 64 A100: FSDP, one sequence on each, every second block checkpointed. Nothing is read
but bytes of Python's standard library: only sizes count here.
"""

parallel = dict(data=64, zero=3)
model = dict(
    type="Llama", num_layers=32, hidden_size=4096, num_heads=32, num_kv_heads=8, ffn_hidden_size=14336,
    vocab_size=128256, seq_len=8192, rotary_base=500000.0,
)  # fmt: skip
data = dict(type="PythonStdlib")
optimizer = dict(type="AdamW", lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1)
train = dict(
    steps=1000, global_batch_size=64, precision="bf16", clip_grad_norm=1.0,
    activation_checkpoint=dict(type="full", every=2),
)  # fmt: skip
