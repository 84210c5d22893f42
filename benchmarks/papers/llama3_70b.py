"""Llama 3 70B (2407.21783, table 3): 80 layers, 8 key/value heads, 8,192 tokens, a vocabulary of 128,256.

    colossus plan benchmarks/papers/llama3_70b.py --devices 512 --hosts 64 --hardware h100

The plan below is torchtitan's on 256 H100 (2410.06511): data 32, sharded, tensor 8, 16 sequences on each replica, full
activation checkpointing. Nothing is read but bytes of Python's standard library: only sizes count here.
"""

parallel = dict(data=32, tensor=dict(mode="1d", size=8, sequence_sharded=True), zero=3)
model = dict(
    type="Llama", num_layers=80, hidden_size=8192, num_heads=64, num_kv_heads=8, ffn_hidden_size=28672,
    vocab_size=128256, seq_len=8192, rotary_base=500000.0,
)  # fmt: skip
data = dict(type="PythonStdlib")
optimizer = dict(type="AdamW", lr=1.5e-4, betas=(0.9, 0.95), weight_decay=0.1)
train = dict(steps=1000, global_batch_size=512, precision="bf16", clip_grad_norm=1.0, activation_checkpoint="full")
