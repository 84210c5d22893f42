"""Inject faults at moments of runs under plans, and print how each ended: exits with 1 if one is not as expected.

    scripts/faults [--fault kill] [--moment backward] [--plan "tensor 2"]

Each option may be given several times; without any, all rows are run (about half an hour on two cores).
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import torch
from helpers import faults


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="scripts/faults", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--fault", action="append", choices=faults.FAULTS)
    parser.add_argument("--moment", action="append", choices=faults.MOMENTS)
    parser.add_argument("--plan", action="append", choices=list(faults.PLANS))
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # launchers are forked
    chosen = [
        case
        for case in faults.cases()
        if (not arguments.fault or case.fault in arguments.fault)
        and (not arguments.moment or case.moment in arguments.moment)
        and (not arguments.plan or case.plan in arguments.plan)
    ]
    print(f"{'plan':<12}{'moment':<15}{'fault':<15}{'seconds':>8}  {'exit':<9}{'named':<7}result")
    failed = 0
    for case in chosen:
        temporary = tempfile.TemporaryDirectory(prefix="colossus-fault-", ignore_cleanup_errors=True)
        with temporary as folder, faults.nothing_runs_on(Path(folder)):
            outcome = faults.run(case, Path(folder))
            wrong = faults.problems(case, outcome)
        failed += bool(wrong)
        seconds = "-" if outcome.seconds is None else f"{outcome.seconds:.1f}"
        codes, named = ", ".join(map(str, outcome.codes)), "yes" if outcome.named else "-"
        print(
            f"{case.plan:<12}{case.moment:<15}{case.fault:<15}{seconds:>8}  {codes:<9}{named:<7}"
            f"{'; '.join(wrong) or 'as expected'}",
            flush=True,
        )
        if wrong:
            print("\n".join(f"    | {line}" for line in outcome.text.splitlines()[-40:]), flush=True)
    print(f"{len(chosen) - failed} of {len(chosen)} rows are as expected")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
