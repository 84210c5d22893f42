"""The tests' process as one from which thousands of ranks are forked: what each would do once, it has done."""

from __future__ import annotations

import gc
import os
import pkgutil
from importlib import import_module

import torch
import torch._dynamo  # own optimizers and checkpoints import it
import torch._subclasses.schema_check_mode  # and each step this

import colossus


def prepare() -> None:
    """Before tests are collected."""
    # workers are forked: the parent must never have run a multi-threaded operation
    torch.set_num_threads(1)
    gc.disable()  # until all is imported
    # a collection in a forked process would touch, and so copy, all that it has from its parent
    os.register_at_fork(after_in_child=gc.freeze)

    # what the package imports when it is needed
    for module in pkgutil.walk_packages(colossus.__path__, "colossus."):
        if not module.name.endswith("__main__"):
            import_module(module.name)
    # what torch imports at the first step
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    optimizer.zero_grad()
    weight.sum().backward()
    optimizer.step()


def collected() -> None:
    """What was imported lives as long as this process: no collection need look at it again."""
    gc.freeze()
    gc.enable()
