"""Ray (https://docs.ray.io): one task on each node of a Ray cluster, which starts the ranks of its node.

ray job submit --working-dir . -- python examples/clusters/ray_job.py config.py --nodes 2 --gpus 8 train.steps=1000

Ray reserves the GPUs of all nodes at once (a placement group) and shows each task its own. All words but --nodes,
--gpus and --port are those of `colossus launch`. Name a run folder that all nodes can write with --run-dir.
"""

import argparse
import subprocess
import sys

import ray
from ray.util import get_node_ip_address, placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy


@ray.remote
def address() -> str:
    """Return the address of the node on which the task runs."""
    return get_node_ip_address()


@ray.remote(max_retries=0)
def launch(words: list[str]) -> int:
    """Run the launcher of a node and return its exit code."""
    return subprocess.run(["colossus", "launch", *words]).returncode


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--gpus", type=int, default=8, help="of each node; 0: one process on its CPU")
    parser.add_argument("--port", type=int, default=29500, help="a free port of the first node")
    options, words = parser.parse_known_args()

    ray.init()
    bundle = {"CPU": 1, **({"GPU": options.gpus} if options.gpus else {})}
    group = placement_group([bundle] * options.nodes, strategy="STRICT_SPREAD")  # each on a node of its own
    ray.get(group.ready())
    nodes = [PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=at) for at in range(options.nodes)]
    head = ray.get(address.options(scheduling_strategy=nodes[0]).remote())
    words += ["--nnodes", str(options.nodes), "--nproc", str(max(options.gpus, 1))]
    words += ["--rdzv-endpoint", f"{head}:{options.port}"]
    tasks = [launch.options(scheduling_strategy=node, num_gpus=options.gpus).remote(words) for node in nodes]
    return max(ray.get(tasks))


if __name__ == "__main__":
    sys.exit(main())
