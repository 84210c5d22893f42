"""Settings for all tests."""

import torch
from hypothesis import settings

import colossus.engine.initialize  # noqa: F401  here once, instead of on each forked rank

# workers are forked: the parent must never have run a multi-threaded operation
torch.set_num_threads(1)

# the machine's speed is not a property of the code
settings.register_profile("repository", deadline=None)
settings.load_profile("repository")
