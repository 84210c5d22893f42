"""The tests' process as one from which thousands of ranks are forked: what each would do once, it has done."""

from __future__ import annotations

import ctypes
import gc
import os
import pkgutil
import sys
from importlib import import_module
from pathlib import Path

import torch
import torch._dynamo  # own optimizers and checkpoints import it
import torch._subclasses.schema_check_mode  # and each step this
from helpers.training import config_of, train

import colossus

_HUGE_PAGE = 2 << 20
#: of Linux 6.1
_MADV_COLLAPSE = 25


def prepare() -> None:
    """Before tests are collected."""
    # workers are forked: the parent must never have run a multi-threaded operation, nor what runs in it as a command
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    # a collection in a forked process would touch, and so copy, all that it has from its parent
    os.register_at_fork(after_in_child=gc.freeze)

    # what the package imports when it is needed
    for module in pkgutil.walk_packages(colossus.__path__, "colossus."):
        if not module.name.endswith("__main__"):
            import_module(module.name)
    # what torch and the package import, look up and keep at the first step
    train(0, config_of({}, 1, "fp64"), 1)


def collected() -> None:
    """What was imported lives as long as this process: no collection need look at it again."""
    gc.freeze()
    gc.enable()
    make_pages_huge()


def make_pages_huge() -> None:
    """Put what this process has written so far into pages of 2 MB, where the kernel can: a fork copies an entry of each
    page, and the forked process goes through them all when it ends. That is half of what a rank costs that does little.
    """
    if sys.platform != "linux":
        return
    madvise = ctypes.CDLL(None).madvise
    for line in Path("/proc/self/maps").read_text().splitlines():
        ends, access, _, _, inode, *name = line.split()
        start, end = (int(address, 16) for address in ends.split("-"))
        start, end = -(-start // _HUGE_PAGE) * _HUGE_PAGE, end // _HUGE_PAGE * _HUGE_PAGE
        if access == "rw-p" and inode == "0" and name in ([], ["[heap]"]) and start < end:
            madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), _MADV_COLLAPSE)
