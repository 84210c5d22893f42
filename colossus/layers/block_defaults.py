"""What a transformer block takes for sizes that nobody gives. No torch: a config says them before any launch."""

from __future__ import annotations

from colossus.arithmetic import round_up


def default_norm_eps(norm: str) -> float:
    """The epsilon of a norm of `colossus.registry.NORMS`."""
    return 1e-6 if norm == "rmsnorm" else 1e-5


def default_ffn_size(mlp: str, hidden_size: int) -> int:
    """Features between the two matmuls of an MLP of `colossus.registry.MLPS`.

    Four times ``hidden_size``. The three matrices of SwiGLU cost what two do at 8/3 of it (2002.05202), here up to a
    multiple of 64. It depends on the model alone: fitted to the tensor ranks, another plan would be another model.
    """
    return round_up(-(-8 * hidden_size // 3), 64) if mlp == "swiglu" else 4 * hidden_size
