"""Disturb runs that are restarted, and print whether each ended as the undisturbed one: exits with 1 if one did not.

    scripts/restart-faults [--fault "kill, from memory"] [--plan "tensor 2"]

Each option may be given several times; without any, all rows are run (a quarter of an hour on two cores).
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

import torch
from helpers import restart_faults


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="scripts/restart-faults", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--fault", action="append", choices=list(restart_faults.FAULTS), metavar="FAULT")
    parser.add_argument("--plan", action="append", choices=list(restart_faults.PLANS), metavar="PLAN")
    given = parser.parse_args()
    torch.set_num_threads(1)  # launchers are forked
    chosen = [
        case
        for case in restart_faults.cases()
        if (not given.fault or case.fault in given.fault) and (not given.plan or case.plan in given.plan)
    ]
    print(f"{'plan':<12}{'fault':<36}{'seconds':>8}  {'behind steps':<14}result")
    failed = 0
    with tempfile.TemporaryDirectory(prefix="colossus-undisturbed-", ignore_cleanup_errors=True) as root:
        for case in chosen:
            undisturbed, began = restart_faults.run_undisturbed(case, Path(root)), time.monotonic()
            with tempfile.TemporaryDirectory(prefix="colossus-fault-", ignore_cleanup_errors=True) as folder:
                wrong = restart_faults.run(case, Path(folder) / "here", undisturbed)
            failed += bool(wrong)
            behind = ", ".join(map(str, restart_faults.FAULTS[case.fault].begins))
            took = f"{time.monotonic() - began:.1f}"
            print(f"{case.plan:<12}{case.fault:<36}{took:>8}  {behind:<14}", end="")
            good = "as expected" if case.plan in restart_faults.INEXACT else "as the undisturbed run"
            print(good if not wrong else "; ".join(wrong[:-1]), flush=True)
            if wrong:
                print("\n".join(f"    | {line}" for line in wrong[-1].splitlines()[-40:]), flush=True)
    print(f"{len(chosen) - failed} of {len(chosen)} rows are as expected")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
