#!/usr/bin/env bash
# Train with several processes: on GPUs over NCCL, without any over gloo.
set -euo pipefail

if [[ $# -lt 2 || ! $2 =~ ^[1-9][0-9]*$ ]]; then
    echo "usage: $0 CONFIG GPUS [options of train.py]   (GPUS: processes on this machine, 1 or more)" >&2
    echo "environment: NNODES=1 NODE_RANK=0 MASTER_ADDR=127.0.0.1 PORT=29500 PYTHON=python" >&2
    exit 2
fi
config=$1 gpus=$2
shift 2

exec "${PYTHON:-python}" -m torch.distributed.run \
    --nnodes="${NNODES:-1}" --node_rank="${NODE_RANK:-0}" --nproc_per_node="$gpus" \
    --master_addr="${MASTER_ADDR:-127.0.0.1}" --master_port="${PORT:-29500}" \
    "$(dirname "${BASH_SOURCE[0]}")/train.py" "$config" --launcher pytorch "$@"
