"""Small models as people write them, each with its batches and its loss, under every plan against plain torch."""

from helpers.user_models import between_pairs, features, images, sequences, small_inputs, torch_features, training  # noqa: F401  they register their models
from helpers.user_models.cases import MODELS

__all__ = ["MODELS"]
