"""What the user of one launcher reads at the end of a run, and the exit code. No torch."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping

from colossus.checkpoint.errors import CheckpointError
from colossus.config import Config
from colossus.context.grid import RankGrid
from colossus.launch import causes, failure
from colossus.launch.outcome import Outcome
from colossus.launch.server_failure import ServerFailure, silent_server
from colossus.launch.stop import exit_code
from colossus.launch.stopped import code_of_stop, failure_block, stopped_line

DONE, FAILED, USAGE = 0, 1, 2


def report(outcome: Outcome, config: Config, grid: RankGrid) -> int:
    """Print what is to be said at the end.

    Returns:
        The exit code.
    """
    folder, exits = outcome.folder, dict(outcome.exits)
    records = {record.rank: record for record in failure.read_all(folder)} if folder is not None else {}
    for end in outcome.others:
        exits |= end.exits
        records |= {record.rank: record for record in end.records}
    server = outcome.server or _silent_server(outcome, records.values(), exits)
    signum = outcome.signum or next((end.signum for end in outcome.others if end.signum), None)
    if signum is not None:
        print(stopped_line(folder, config, signum))
        if server is not None:
            print(server.block(folder), file=sys.stderr)
            return FAILED
        # one that failed because another rank has ended is a victim
        own = (record for record in records.values() if record.kind != "communication")
        unsaved = next((record for record in own if record.type == CheckpointError.__name__), None)
        if unsaved is not None:
            print(f"colossus: {unsaved.message}", file=sys.stderr)
            return FAILED
        found = causes.rank_causes(records.values(), exits)
        return exit_code(signum) if outcome.is_hurried else code_of_stop(exit_code(signum), found, config, grid, folder)
    if server is not None:
        print(server.block(folder), file=sys.stderr)
        return FAILED
    found = causes.rank_causes(records.values(), exits)
    if outcome.gone and not (found and found[0].kind in causes.CULPRITS):
        print(causes.gone_block(outcome.gone, folder), file=sys.stderr)
        return FAILED
    if exits and all(ended.code == 0 and not ended.is_early for ended in exits.values()):
        return DONE
    stopped = causes.was_only_stopped(records.values(), exits)
    if stopped is not None:
        print(stopped_line(folder, config, stopped - 128))
        return stopped if outcome.is_hurried else code_of_stop(stopped, found, config, grid, folder)
    if found and found[0].record is not None and found[0].record.kind == "config":
        print(f"colossus: {found[0].record.message}", file=sys.stderr)
        return USAGE
    if found and (found[0].rank in outcome.exits or len(outcome.exits) == grid.world_size):
        print(failure_block(found, config, grid, folder), file=sys.stderr)
    elif found:
        print(causes.elsewhere(found[0], grid, folder), file=sys.stderr)
    else:
        print(f"colossus: the run ended with exit codes {exits} and no record in {folder}", file=sys.stderr)
    return FAILED


def _silent_server(
    outcome: Outcome, records: Collection[failure.FailureRecord], exits: Mapping[int, causes.RankExit]
) -> ServerFailure | None:
    """The server that workers have waited for in vain, where no rank has failed by itself."""
    found = causes.rank_causes(records, exits)
    if not found or found[0].kind in causes.CULPRITS:
        return None
    return silent_server(records, outcome.endpoints)
