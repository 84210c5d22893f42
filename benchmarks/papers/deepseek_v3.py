"""DeepSeek-V3 (2412.19437): latent attention, 61 layers, all but three with 256 experts of which a token takes 8.

    colossus plan benchmarks/papers/deepseek_v3.py --devices 2048 --hosts 256 --hardware h800

Different is: one token is predicted, not two (`mtp_weight`); products are in bf16, not in fp8.

The plan below is theirs on 2,048 H800: pipeline 16, experts over 64 ranks, ZeRO 1; zb-v for their DualPipe. Nothing is
read but bytes of Python's standard library: only sizes count here.
"""

parallel = dict(data=128, pipeline=16, expert=64, zero=1)
model = dict(
    type="Llama", num_layers=61, hidden_size=7168, num_heads=128, ffn_hidden_size=18432, tie_embeddings=False,
    latent=dict(kv_rank=512, q_rank=1536, nope_dim=128, rope_dim=64, value_dim=128),
    experts=dict(
        num=256, top_k=8, ffn_size=2048, shared=2048, first_dense=3, score="sigmoid", groups=8, top_groups=4, scale=2.5,
        bias_update=1e-3,
    ),
    vocab_size=129280, seq_len=4096, rotary_base=10000.0,
)  # fmt: skip
data = dict(type="PythonStdlib")
optimizer = dict(type="AdamW", lr=2.2e-4, betas=(0.9, 0.95), weight_decay=0.1)
schedule = dict(type="zb-v", microbatches=120)
train = dict(
    steps=1000, global_batch_size=15360, precision="bf16", clip_grad_norm=1.0, activation_checkpoint="selective"
)  # fmt: skip
