#!/usr/bin/env bash
# Evaluate with several processes: on GPUs over NCCL, without any over gloo.
set -euo pipefail

if [[ $# -lt 3 || ! $3 =~ ^[1-9][0-9]*$ ]]; then
    echo "usage: $0 CONFIG CHECKPOINT GPUS [options of test.py]   (GPUS: processes on this machine, 1 or more)" >&2
    echo "environment: NNODES=1 NODE_RANK=0 MASTER_ADDR=127.0.0.1 PORT=29500 PYTHON=python" >&2
    exit 2
fi
config=$1 checkpoint=$2 gpus=$3
shift 3

exec "${PYTHON:-python}" -m torch.distributed.run \
    --nnodes="${NNODES:-1}" --node_rank="${NODE_RANK:-0}" --nproc_per_node="$gpus" \
    --master_addr="${MASTER_ADDR:-127.0.0.1}" --master_port="${PORT:-29500}" \
    "$(dirname "${BASH_SOURCE[0]}")/test.py" "$config" "$checkpoint" --launcher pytorch "$@"
