"""Settings for all tests."""

import gc
import os
import pkgutil
from importlib import import_module

os.environ["CUDA_VISIBLE_DEVICES"] = ""  # tests are of the CPU wherever they run: real devices are for scripts/test-gpu

import torch

if torch.cuda.device_count():  # the tests' process is forked, which CUDA and its thread of autograd do not survive
    os.environ["CUDA_VISIBLE_DEVICES"] = ""

import torch._dynamo  # own optimizers and checkpoints import it: here once, instead of on each forked rank
from helpers import segments
from helpers.drawn import DEV_EXAMPLES
from hypothesis import settings

import colossus

# likewise: what the package imports when it is needed, each forked rank would import (and compile) again
for module in pkgutil.walk_packages(colossus.__path__, "colossus."):
    if not module.name.endswith("__main__"):
        import_module(module.name)

# workers are forked: the parent must never have run a multi-threaded operation
torch.set_num_threads(1)

# a collection in a forked process would touch, and so copy, all that it has from its parent
os.register_at_fork(before=gc.freeze, after_in_parent=gc.unfreeze)

segments.shrink()

# the machine's speed is not a property of the code; HYPOTHESIS_PROFILE=long draws as many as find what is rare
settings.register_profile("dev", deadline=None, max_examples=DEV_EXAMPLES)
settings.register_profile("long", deadline=None, max_examples=20 * DEV_EXAMPLES)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "dev"))
