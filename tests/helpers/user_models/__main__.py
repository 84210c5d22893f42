"""Print the table of user models and plans: ``scripts/user-models [--models REGEX] [--plans REGEX]``."""

from __future__ import annotations

import argparse
import re
import sys
from collections import Counter

from helpers.user_models import MODELS
from helpers.user_models.table import PLANS, Cell, fill, twins

SIGNS = {"equal": "=", "refused": "refused", "differs": "differs"}


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/user-models")
    parser.add_argument("--models", default="", metavar="REGEX", help="rows: names of models that contain this")
    parser.add_argument("--plans", default="", metavar="REGEX", help="columns: names of plans that contain this")
    given = parser.parse_args()
    models = [model for name, model in MODELS.items() if re.search(given.models, name)]
    plans = [name for name in PLANS if re.search(given.plans, name)]
    if not models or not plans:
        for what, found, known in (("model", models, MODELS), ("plan", plans, PLANS)):
            if not found:
                print(f"no {what} of that name; there are {', '.join(known)}", file=sys.stderr)
        return 2
    oracle = twins(models)
    cells: list[Cell] = []
    for plan in plans:
        print(f"running {plan} ...", file=sys.stderr)
        cells += fill(models, [plan], oracle)
    found = {(cell.model, cell.plan): cell for cell in cells}
    for number, plan in enumerate(plans, start=1):
        print(f"{number:3}  {plan}")
    print(" " * 34 + "".join(f"{number:>9}" for number in range(1, len(plans) + 1)))
    for model in models:
        signs = [SIGNS.get(found[model.name, plan].outcome, "FAILS") for plan in plans]
        print(f"{model.name:34}" + "".join(f"{sign:>9}" for sign in signs))
    counted = Counter(cell.outcome if cell.holds else "FAILS" for cell in cells)
    print(", ".join(f"{count} {outcome}" for outcome, count in counted.most_common()), f"of {len(cells)} cells")
    for cell in cells:
        if not cell.holds:
            print(f"\n{cell.model} under {cell.plan}: {cell.outcome}\n{cell.words}")
    return 0 if all(cell.holds for cell in cells) else 1


if __name__ == "__main__":
    sys.exit(main())
