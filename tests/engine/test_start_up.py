"""What a run imports: start-up is paid by every rank of every run."""

from __future__ import annotations

import subprocess
import sys
import textwrap

CODE = """
    import sys, torch
    from torch import nn
    import colossus
    from colossus import layers
    from colossus.registry import OPTIMIZERS

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.norm, self.out = nn.Embedding(5, 8), nn.LayerNorm(8), nn.Linear(8, 8)
            self.block, self.lstm = layers.TransformerBlock(8, 2), nn.LSTM(8, 8)
            nn.init.kaiming_normal_(self.out.weight).data.mul_(0.5)
            self.register_buffer("noise", torch.rand(3))

        def forward(self, ids):
            return self.out(self.block(self.norm(self.embedding(ids))))

    for name in OPTIMIZERS.names():
        config = dict(train=dict(global_batch_size=2), optimizer=dict(type=name, lr=1e-2), device="cpu")
        engine = colossus.initialize(config, model=Net, loss_fn=lambda out, ids: (out.square().sum(), ids.numel()))
        assert engine.train_step(torch.zeros(2, 4, dtype=torch.long)).grad_norm > 0
        engine.optimizer.load_state_dict(engine.optimizer.state_dict())
    print([name for name in ("torch._dynamo", "torch._inductor", "sympy") if name in sys.modules])
"""


def test_a_run_imports_no_compiler() -> None:
    """torch's optimizers, dispatch modes and meta kernels import torch._dynamo where nobody compiles: 1.6 s a rank."""
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(CODE)], capture_output=True, text=True, timeout=240, check=False
    )
    assert (run.returncode, run.stdout.strip()) == (0, "[]"), run.stdout + run.stderr
