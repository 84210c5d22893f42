"""How the next token is chosen. No torch."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Sampling:
    """Temperature, then top-k, then top-p (1904.09751), each on what the one before has left.

    Attributes:
        temperature: logits are divided by it: below 1 likely tokens become likelier.
        top_k: only as many of the likeliest tokens (and those as likely as the last of them); None: all.
        top_p: only the likeliest tokens whose probabilities together reach it, at least one; 1: all.
        greedy: the likeliest token, the first of equals; the rest means nothing then.
        seed: of the random numbers, which are a function of it, the row of the prompt, and the position of the token.

    Raises:
        ValueError: for a value that means nothing, one line for each.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    greedy: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        problems = self._problems()
        if problems:
            raise ValueError("\n".join(problems))

    def _problems(self) -> list[str]:
        found = [f"seed = {self.seed}: it must be 0 or more"] if self.seed < 0 else []
        if self.greedy:
            return found
        if not (self.temperature > 0 and math.isfinite(self.temperature)):
            found.append(
                f"temperature = {self.temperature}: it divides the logits, so it must be above 0 and finite; for the "
                f"likeliest token take greedy"
            )
        if self.top_k is not None and self.top_k < 1:
            found.append(
                f"top_k = {self.top_k}: it keeps so many tokens, at least 1; leave it out for all of them, or take "
                f"greedy for the likeliest one"
            )
        if not 0 < self.top_p <= 1:
            found.append(f"top_p = {self.top_p}: it is a probability to keep, above 0 and at most 1 (1 keeps all)")
        return found
