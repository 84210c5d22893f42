"""Processes that run a module of this very colossus, whatever is in the current folder.

``python -m`` would search the current folder before the standard library: a ``queue.py`` there, or a clone in a folder
``colossus``, would replace Python's own module, or this package. So this file is run by its path, by an interpreter
that leaves the current folder out. Data loader workers of such a process that begin with an interpreter of their own
also run it first.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import sys
from importlib.util import module_from_spec, spec_from_file_location
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import subprocess


def python_words(module: str, *arguments: str) -> list[str]:
    """Return the words of a command that runs the ``main`` of a module of colossus with these arguments."""
    return [sys.executable, "-P", os.path.abspath(__file__), module, *arguments]


def start_python(module: str, *arguments: str, **options: Any) -> subprocess.Popen[bytes]:
    """Start such a process in a session of its own; ``options`` are those of `subprocess.Popen`."""
    import subprocess

    return subprocess.Popen(python_words(module, *arguments), start_new_session=True, **options)


def kill_with_children(process: Any) -> None:
    """Kill a process that leads a session, and all in its session, and wait for its end."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _import_colossus() -> None:
    """Import the package in whose folder this file lies, wherever else one could be found."""
    folder = os.path.dirname(os.path.abspath(__file__))
    file = os.path.join(folder, "__init__.py")
    spec = spec_from_file_location("colossus", file, submodule_search_locations=[folder])
    assert spec is not None
    assert spec.loader is not None
    sys.modules["colossus"] = package = module_from_spec(spec)
    spec.loader.exec_module(package)


if __name__ == "__main__":
    # a Ctrl-C during the imports ends a rank without a traceback; then the module listens for signals itself
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    _import_colossus()
    sys.exit(importlib.import_module(sys.argv[1]).main(sys.argv[2:]))
elif __name__ == "__mp_main__":  # a data loader worker of such a process
    _import_colossus()
