"""Models that nobody here wrote, as their packages ship them, at tiny sizes: rows of the table of user models."""

from importlib import import_module

from helpers.outside_models.rows import OUTSIDE, oracle_of

__all__ = ["OUTSIDE", "oracle_of"]

for file in (
    "decoders", "mixtures", "states", "encoders", "translators", "vision", "speech", "pairs_of_inputs",
    "other_packages", "own_copies",
):  # fmt: skip
    import_module(f"{__name__}.{file}")
