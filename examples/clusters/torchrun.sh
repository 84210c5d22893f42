#!/usr/bin/env bash
# torchrun, given on every node with the same arguments, which are those of `colossus launch`:
#   HEAD=node0 NODES=2 GPUS=8 examples/clusters/torchrun.sh config.py checkpoint.every=500
# HEAD is the host of one of the nodes. When a rank fails, torchrun starts all of them again, and they continue.
set -euo pipefail
: "${HEAD:?the host name of one of the nodes}" "${NODES:?the number of nodes}" "${GPUS:?the devices of a node}"

exec torchrun --nnodes "$NODES" --nproc-per-node "$GPUS" --max-restarts 9 \
    --rdzv-id pretrain --rdzv-backend c10d --rdzv-endpoint "$HEAD:29500" \
    -m colossus launch "$@" --run-dir runs/pretrain checkpoint.resume=auto
