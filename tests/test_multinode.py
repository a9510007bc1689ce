"""More than one node: two launches of dist_train.sh on one host, and what Slurm is asked for."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from toy import ENVIRONMENT, TOOLS, run_pair, same, weights, write_scenes, write_segmentation_config


def free_port() -> int:
    with socket.socket() as free:
        free.bind(('127.0.0.1', 0))
        return free.getsockname()[1]


def launch(config: Path, rank: int, port: int) -> subprocess.Popen:
    """Start dist_train.sh with one process, as the node ``rank`` of two."""
    nodes = dict(NNODES='2', NODE_RANK=str(rank), MASTER_ADDR='127.0.0.1', PORT=str(port))
    return subprocess.Popen(
        ['bash', str(TOOLS / 'dist_train.sh'), str(config), '1', '--work-dir', 'nodes'],
        cwd=config.parent,
        env=ENVIRONMENT | nodes | dict(PYTHON=sys.executable),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def test_two_nodes_equal_one_with_two_processes(tmp_path):
    write_scenes(tmp_path / 'data')
    lines = 'custom_hooks.insert(0, dict(type="SyncBuffersHook"))\ntrain_cfg["max_iters"] = 4\n'
    config = write_segmentation_config(tmp_path / 'seg.py', tmp_path / 'data', lines)
    port = free_port()
    nodes = [launch(config, rank, port) for rank in range(2)]
    try:
        for node in nodes:
            output, _ = node.communicate()
            assert node.returncode == 0, output
    finally:
        for node in nodes:
            node.terminate()
    for rank in run_pair('train.py', config, '--work-dir', 'node', cwd=tmp_path, port=free_port()):
        assert rank.code == 0, rank.output

    expected = weights(tmp_path / 'node/rank0.pth')
    for rank in range(2):
        assert same(weights(tmp_path / f'nodes/rank{rank}.pth'), expected)
    assert len(list((tmp_path / 'nodes').glob('iter_*.pth'))) == 1  # the first node's alone


@pytest.fixture
def slurm(tmp_path):
    """Run a Slurm script from a folder in which srun only leaves its arguments."""
    srun = tmp_path / 'bin/srun'
    srun.parent.mkdir()
    srun.write_text('#!/usr/bin/env bash\nprintf "%s\\n" "$@" >srun.txt\nexit 7\n')
    srun.chmod(0o755)

    def run(script: str, *arguments: str, **env: str) -> tuple[subprocess.CompletedProcess, list]:
        finished = subprocess.run(
            ['bash', os.path.relpath(TOOLS / script, tmp_path), *arguments],
            cwd=tmp_path,
            env=dict(env, PATH=f'{srun.parent}:{os.environ["PATH"]}'),
            text=True,
            capture_output=True,
        )
        record = tmp_path / 'srun.txt'
        return finished, record.read_text().splitlines() if record.exists() else []

    return run


@pytest.mark.parametrize(
    ('env', 'gpus', 'per_node', 'cpus', 'extra'),
    [
        ({}, 8, 8, 5, []),
        (dict(GPUS='16', CPUS_PER_TASK='4'), 16, 8, 4, []),
        (dict(GPUS='4', PYTHON='python3.11'), 4, 4, 5, []),
        (dict(GPUS='8', GPUS_PER_NODE='4'), 8, 4, 5, []),
        (dict(SRUN_ARGS=' --time=1:00  -x node7'), 8, 8, 5, ['--time=1:00', '-x', 'node7']),
    ],
)
@pytest.mark.parametrize(
    ('script', 'fourth', 'options'),
    [
        ('train', 'the work', ['--work-dir', 'the work']),
        ('test', 'the work/last.pth', ['the work/last.pth']),
    ],
)
def test_slurm_scripts(slurm, tmp_path, script, fourth, options, env, gpus, per_node, cpus, extra):
    rest = ['--cfg-options', 'train_cfg.max_iters=4', 'model.backbone.arch=s']
    arguments = ['gpu', 'a job', 'a config.py', fourth, *rest]
    finished, srun = slurm(f'slurm_{script}.sh', *arguments, **env)
    assert finished.returncode == 7, finished.stderr  # srun's own
    assert srun == [
        *('--partition=gpu', '--job-name=a job', f'--gres=gpu:{per_node}', f'--ntasks={gpus}'),
        *(f'--ntasks-per-node={per_node}', f'--cpus-per-task={cpus}', '--kill-on-bad-exit=1'),
        *extra,
        *(env.get('PYTHON', 'python'), '-u', os.path.relpath(TOOLS / f'{script}.py', tmp_path)),
        *('a config.py', *options, '--launcher', 'slurm', *rest),
    ]


@pytest.mark.parametrize('script', ['slurm_train.sh', 'slurm_test.sh'])
@pytest.mark.parametrize(
    ('arguments', 'env'),
    [
        (['gpu', 'job', 'config.py'], {}),
        (['gpu', 'job', 'config.py', 'work'], dict(GPUS='0')),
        (['gpu', 'job', 'config.py', 'work'], dict(GPUS_PER_NODE='two')),
        (['gpu', 'job', 'config.py', 'work'], dict(CPUS_PER_TASK='-1')),
    ],
)
def test_slurm_scripts_name_their_arguments(slurm, script, arguments, env):
    finished, srun = slurm(script, *arguments, **env)
    assert finished.returncode == 2
    assert f'{script} PARTITION JOB_NAME CONFIG ' in finished.stderr.splitlines()[0]
    assert 'GPUS=8 GPUS_PER_NODE=8 CPUS_PER_TASK=5' in finished.stderr
    assert srun == []
