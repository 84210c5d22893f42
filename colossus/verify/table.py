"""How much agreed, as a table."""

from __future__ import annotations

from colossus.verify.compare import Verdict
from colossus.verify.finding import KINDS


def table(verdict: Verdict) -> list[str]:
    """Kinds of things, how many of each, and the largest difference with its place."""
    if not verdict.tallies:
        return ["nothing agrees before it"]
    rows = [("agree", "number", "largest difference", "where")]
    for kind, tally in verdict.tallies.items():
        largest = f"{tally.largest:.2g}" if tally.largest else "0"
        rows.append((KINDS[kind], str(tally.count), largest, tally.where))
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    lines = [f"{row[0]:<{widths[0]}}  {row[1]:>{widths[1]}}  {row[2]:>{widths[2]}}  {row[3]}".rstrip() for row in rows]
    if verdict.left_out:
        lines.append(
            f"not compared: {verdict.left_out:,} weights whose gradient is rounding noise (as a key bias has it)"
        )
    return lines
