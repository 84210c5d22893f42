"""The GPT of gpt_stdlib.py, trained by 4 workers that wait for nobody: parameters and AdamW live at 2 servers.

    colossus launch configs/gpt_stdlib_async.py

A push of any worker is an update: with 4 workers 2,000 of them in 500 steps, each of a quarter of the batch and from
parameters that others have changed meanwhile. So the learning rate is smaller than that of gpt_stdlib.py, and Adam has
less momentum: asynchrony is one (Mitliagkas et al., 2016). Pulls are not made ahead: on one host they take no time, and
what was pulled one step before is staler.

Validation loss 2.02 after 500 steps (2 minutes on two cores): gpt_stdlib.py, in step, has 1.73. What it is depends on
how stale updates are, and so on the machine. With parallel.strategy.algorithm=easgd optimizer.lr=2e-3
"optimizer.betas=(0.9, 0.95)" it is 1.99.
"""

parallel = dict(data=4, strategy=dict(type="server", mode="async", servers=2, prefetch=False))
model = dict(type="GPT", num_layers=4, hidden_size=128, num_heads=4, vocab_size=256, seq_len=128)
data = dict(type="PythonStdlib")
optimizer = dict(type="AdamW", lr=5e-4, betas=(0.5, 0.95), weight_decay=0.1)
lr_schedule = dict(type="cosine", warmup_steps=50, min_ratio=0.05)
train = dict(steps=500, global_batch_size=32, clip_grad_norm=1.0, eval_every=250, eval_batches=90, seed=0)
checkpoint = dict(every=250)  # and after the last step; `colossus launch configs/gpt_stdlib_async.py --resume` goes on
