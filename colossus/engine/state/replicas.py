"""Parameters per replica, as inexact strategies (gossip, local steps) have them.

Those of the first data rank are under the plain keys, as if they were all: what loads weights alone, or under another
number of data ranks, takes these. Those of the others are beside them, and each goes on with its own where there are as
many data ranks as then.
"""

from __future__ import annotations

from colossus.checkpoint.manifest import Manifest

_ROOT = "replicas/"


def replica_prefix(index: int) -> str:
    """Before the keys of the replica of a data rank other than the first."""
    return f"{_ROOT}{index}/"


def num_replicas(manifest: Manifest) -> int:
    """How many were saved each for itself; 1 where they were equal."""
    return 1 + max((int(key.split("/")[1]) for key in manifest.tensors if key.startswith(_ROOT)), default=0)
