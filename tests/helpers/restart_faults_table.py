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
from helpers.host_faults import lose_and_take_back

from benchmarks.hosts import located_error


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
    if not given.plan and not given.fault:
        for in_memory in (True, False):
            fault = f"a host lost and back, from {'memory' if in_memory else 'the disk'}"
            chosen.append(restart_faults.Case(fault, "2 hosts"))
            print(f"{'2 hosts':<12}{fault:<36}", end="")
            if (reason := located_error()) is not None:
                print(f"not run: {reason}")
                continue
            with tempfile.TemporaryDirectory(prefix="colossus-fault-", ignore_cleanup_errors=True) as folder:
                wrong = lose_and_take_back(Path(folder), in_memory=in_memory)
            failed += bool(wrong)
            print("\n    | ".join(wrong).rstrip() or f"{'':24}as the undisturbed run", flush=True)
    print(f"{len(chosen) - failed} of {len(chosen)} rows are as expected")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
