"""What ``colossus generate`` is asked for. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Request:
    """What is asked for.

    Attributes:
        checkpoint: where the model is.
        overrides: of the plan.
        prompts: text; ``-``, or none and no tokens either, is standard input.
        tokens: prompts as ids.
        max_tokens: to make of each prompt.
        tokenizer: "bytes" or a path; None: as the checkpoint records.
        config: a config file with the model.
        json: print one JSON object at the end, in place of text.
    """

    checkpoint: str
    overrides: Sequence[str] = ()
    prompts: Sequence[str] = ()
    tokens: Sequence[Sequence[int]] = ()
    max_tokens: int = 256
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    greedy: bool = False
    seed: int = 0
    tokenizer: str | None = None
    config: str | None = None
    json: bool = False
