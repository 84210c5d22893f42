"""Large-model parallelism on PyTorch, declared in a config file. Importing this imports no torch."""

from typing import TYPE_CHECKING

from colossus import config_module  # noqa: F401  # finds config files in processes that unpickle their objects
from colossus._lazy import lazy_names

if TYPE_CHECKING:
    from colossus import checkpoint, data, data_parallel, engine, hf, inference, layers, server  # noqa: F401
    from colossus.construct.build_model import build
    from colossus.context.parallel_context import ParallelContext, current_context
    from colossus.convert.parallelize import parallelize
    from colossus.convert.plain import plain
    from colossus.data_parallel.gossip.average import average
    from colossus.engine.initialize import initialize

__version__ = "0.1.0"
__all__ = ["ParallelContext", "average", "build", "current_context", "initialize", "parallelize", "plain"]

#: packages with public names: ``import colossus`` is enough for ``colossus.hf.save``
_PACKAGES = ("checkpoint", "data", "data_parallel", "engine", "hf", "inference", "layers", "server")

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "ParallelContext": "context.parallel_context",
        "current_context": "context.parallel_context",
        "average": "data_parallel.gossip.average",
        "initialize": "engine.initialize",
        "build": "construct.build_model",
        "parallelize": "convert.parallelize",
        "plain": "convert.plain",
        **{name: name for name in _PACKAGES},
    },
)
