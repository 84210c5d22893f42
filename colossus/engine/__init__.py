"""The train step: forward and backward by a schedule, gradients reduced by a strategy, clipped, applied."""

from typing import TYPE_CHECKING

from colossus._lazy import lazy_names

if TYPE_CHECKING:
    from colossus.engine.engine import Engine
    from colossus.engine.fit import FitSummary, Hook
    from colossus.engine.nonfinite import NonFiniteGradients
    from colossus.engine.replica_check import ReplicasDiffer
    from colossus.engine.results import EvalResult, StepResult

__all__ = ["Engine", "EvalResult", "FitSummary", "Hook", "NonFiniteGradients", "ReplicasDiffer", "StepResult"]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "Engine": "engine",
        "EvalResult": "results",
        "FitSummary": "fit",
        "Hook": "fit",
        "NonFiniteGradients": "nonfinite",
        "ReplicasDiffer": "replica_check",
        "StepResult": "results",
    },
)
