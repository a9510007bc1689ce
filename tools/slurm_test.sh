#!/usr/bin/env bash
# Evaluate as a Slurm job with one task for each GPU.
set -euo pipefail

gpus=${GPUS:-8} gpus_per_node=${GPUS_PER_NODE:-8} cpus_per_task=${CPUS_PER_TASK:-5}
counts="$gpus $gpus_per_node $cpus_per_task"
if [[ $# -lt 4 || ! $counts =~ ^[1-9][0-9]*(\ [1-9][0-9]*){2}$ ]]; then
    echo "usage: $0 PARTITION JOB_NAME CONFIG CHECKPOINT [options of test.py]" >&2
    echo "environment: GPUS=8 GPUS_PER_NODE=8 CPUS_PER_TASK=5 (each 1 or more)" \
        "SRUN_ARGS= MASTER_PORT=29500 PYTHON=python" >&2
    exit 2
fi
partition=$1 job_name=$2 config=$3 checkpoint=$4
shift 4
# A job smaller than a node takes a part of it.
if ((gpus_per_node > gpus)); then gpus_per_node=$gpus; fi
read -ra srun_args <<<"${SRUN_ARGS:-}"

exec srun --partition="$partition" --job-name="$job_name" --gres="gpu:$gpus_per_node" \
    --ntasks="$gpus" --ntasks-per-node="$gpus_per_node" --cpus-per-task="$cpus_per_task" \
    --kill-on-bad-exit=1 ${srun_args[@]+"${srun_args[@]}"} \
    "${PYTHON:-python}" -u "$(dirname "${BASH_SOURCE[0]}")/test.py" "$config" "$checkpoint" \
    --launcher slurm "$@"
