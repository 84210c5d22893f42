#!/usr/bin/env bash
# SLURM: one task on each node, which starts the ranks of its node. Arguments are those of `colossus launch`:
#   sbatch examples/clusters/slurm.sh config.py train.steps=1000 checkpoint.every=500
#SBATCH --job-name=pretrain
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --signal=USR1@120
#SBATCH --requeue
#SBATCH --open-mode=append
set -euo pipefail

# USR1 comes 120 s before the time is over: the ranks finish their step, save it, and end with 143
# srun does not take --cpus-per-task from sbatch, since SLURM 22.05
code=0
srun --wait=300 --cpus-per-task="$SLURM_CPUS_PER_TASK" colossus launch "$@" --nnodes "$SLURM_JOB_NUM_NODES" \
    --nproc "$SLURM_GPUS_ON_NODE" --run-dir "runs/pretrain-$SLURM_JOB_ID" checkpoint.resume=auto || code=$?

# the same job again, which continues; a config that is wrong (2) is not mended by another try
if [ "$code" = 143 ] || [ "$code" = 1 ]; then
    [ "${SLURM_RESTART_COUNT:-0}" -ge 20 ] || scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
