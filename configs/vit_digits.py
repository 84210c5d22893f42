"""A small ViT on scikit-learn's handwritten digits (pip install "colossus[images]"): data 2 on 2 processes.

    colossus launch configs/vit_digits.py

Any plan trains the same model: try parallel.data=1 parallel.tensor=2, or parallel.data=1 parallel.pipeline=2.
"""

parallel = dict(data=2)
model = dict(
    type="ViT", num_layers=4, hidden_size=64, num_heads=4, image_size=8, patch_size=2, in_channels=1, num_classes=10,
    dropout=0.1, label_smoothing=0.1,
)  # fmt: skip
data = dict(type="Digits")
optimizer = dict(type="AdamW", lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)
lr_schedule = dict(type="cosine", warmup_steps=100, min_ratio=0.05)
train = dict(steps=800, global_batch_size=64, clip_grad_norm=1.0, eval_every=200, log_every=50, seed=0)
checkpoint = dict(every=400)  # and after the last step; `colossus launch configs/vit_digits.py --resume` goes on
