"""How ``benchmark.py`` measures: time, peak memory, and what the machine itself reaches."""

from __future__ import annotations

import gc
import os
import statistics
import subprocess
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

Step = Callable[[], None]

MIN_SECONDS = 0.1  # of one turn; shorter calls are repeated in it
# Read by the C library of a new process: freed blocks of 64 KiB and more go back to the system, so
# that they do not count as used. By default it keeps the larger ones that it has seen freed.
MALLOC = {'MALLOC_MMAP_THRESHOLD_': '65536', 'MALLOC_TRIM_THRESHOLD_': '65536'}


def timed(step: Step, device: str, calls: int = 1) -> float:
    """Seconds of one call, over several in a row."""
    start = time.perf_counter()
    for _ in range(calls):
        step()
    if device == 'cuda':
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / calls


def take_turns(steps: Mapping[str, Step], repeats: int, device: str) -> dict[str, dict[str, float]]:
    """The median ``seconds`` of each step, timed in turns, and its ``first_seconds``."""
    first, calls, samples = {}, {}, defaultdict(list)
    for name, step in steps.items():
        first[name] = timed(step, device)  # compiles, chooses kernels, fills caches
        calls[name] = max(1, round(MIN_SECONDS / timed(step, device)))
    for _ in range(repeats):
        for name, step in steps.items():
            samples[name].append(timed(step, device, calls[name]))
    return {
        name: dict(seconds=statistics.median(samples[name]), first_seconds=first[name])
        for name in steps
    }


def peak_memory(build: Callable[[], Step], threads: int, device: str) -> float | None:
    """MiB that a step needs above the idle state of a new process; None if that process died.

    ``build`` is called in the new process, so it must be picklable.
    """
    with (
        mock.patch.dict(os.environ, MALLOC),
        ProcessPoolExecutor(max_workers=1, mp_context=get_context('spawn')) as pool,
    ):
        try:
            return pool.submit(_peak_of_second_call, build, threads, device).result()
        except BrokenProcessPool:
            return None


def _peak_of_second_call(build: Callable[[], Step], threads: int, device: str) -> float:
    torch.set_num_threads(threads)
    step = build()
    step()  # what libraries allocate once is no part of the peak
    gc.collect()
    if device == 'cuda':
        torch.cuda.reset_peak_memory_stats()
        idle = torch.cuda.memory_allocated()
        step()
        return (torch.cuda.max_memory_allocated() - idle) / 2**20
    Path('/proc/self/clear_refs').write_text('5')  # the peak VmHWM falls back to VmRSS
    idle = _kib('/proc/self/status', 'VmRSS')
    step()
    return (_kib('/proc/self/status', 'VmHWM') - idle) / 2**10


def _kib(file: str, key: str) -> int:
    lines = Path(file).read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f'{key}:'))


def free_bytes(device: str) -> int:
    if device == 'cuda':
        return torch.cuda.mem_get_info()[0]
    return 1024 * _kib('/proc/meminfo', 'MemAvailable')


class Limits(NamedTuple):
    """What the machine reaches in large operations, the two parts of a roofline."""

    flops: float  # a second, in a matrix product
    traffic: float  # bytes a second, read and written in a copy

    def shares(self, seconds: float, flops: float, traffic: float) -> dict[str, Any]:
        bounds = dict(compute=flops / self.flops, traffic=traffic / self.traffic)
        row = {f'{name}_share': bound / seconds for name, bound in bounds.items()}
        roofline, bound = max(bounds.items(), key=lambda item: item[1])
        return row | dict(
            gflop_per_s=flops / seconds / 1e9, roofline=roofline, roofline_seconds=bound
        )


def measure_limits(repeats: int, device: str, dtype: torch.dtype) -> Limits:
    side, length = (8192, 2**28) if device == 'cuda' else (2048, 2**26)
    matrix = torch.rand(side, side, device=device).to(dtype)
    source = torch.rand(length, device=device)
    product, target = torch.empty_like(matrix), torch.empty_like(source)
    steps = {
        'product': lambda: torch.mm(matrix, matrix, out=product),
        'copy': lambda: target.copy_(source),
    }
    times = {name: row['seconds'] for name, row in take_turns(steps, repeats, device).items()}
    return Limits(2 * side**3 / times['product'], 2 * 4 * length / times['copy'])


def count_flops(step: Step) -> int:
    """FLOPs of the matrix products and convolutions of a forward pass.

    On the meta device it takes no time. Those of a backward pass are twice as many; torch 2.9
    would count its depthwise convolutions as full ones.
    """
    with FlopCounterMode(display=False) as counter:
        step()
    return counter.get_total_flops()


# Operations of torch by what they compute; names of forward and backward contain these.
KERNELS = {
    'softmax_attention': ('scaled_dot_product', '_attention_'),
    'convolution': ('convolution',),
    'linear_layers': ('aten::addmm', 'aten::mm', 'aten::linear'),
    'batched_products': ('aten::bmm', 'aten::baddbmm'),
}


def kernel_shares(step: Step, device: str) -> dict[str, float]:
    """Which part of a step's time the libraries' large kernels take, and the ``rest``.

    The shares add up to 1. Time is that of the CPU or, on a GPU, of its kernels.
    """
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device == 'cuda')
    step()
    with profile(activities=activities) as profiler:
        step()
    seconds = dict.fromkeys([*KERNELS, 'rest'], 0.0)
    for event in profiler.key_averages():
        if event.device_type != DeviceType.CPU:
            continue  # a GPU's kernels count with the operations that launched them
        on_gpu = device == 'cuda'
        own = event.self_device_time_total if on_gpu else event.self_cpu_time_total
        kinds = [kind for kind, names in KERNELS.items() if any(x in event.key for x in names)]
        seconds[kinds[0] if kinds else 'rest'] += own
    return {kind: time / sum(seconds.values()) for kind, time in seconds.items()}


def fit_exponent(sizes: Sequence[float], values: Sequence[float]) -> float:
    """The ``p`` of ``values ~ sizes ** p``, by least squares of the logarithms."""
    return float(np.polyfit(np.log(sizes), np.log(values), 1)[0])


def describe_machine(threads: int, device: str) -> str:
    cpuinfo = Path('/proc/cpuinfo').read_text().splitlines()
    cpu = next((x.split(': ', 1)[1] for x in cpuinfo if x.startswith('model name')), 'unknown')
    gpu = torch.cuda.get_device_name() if device == 'cuda' else 'none'
    return f'CPU {cpu}, {threads} of {os.cpu_count()} threads; GPU {gpu}'


def describe_commit() -> str:
    git = ['git', 'describe', '--always', '--dirty', '--exclude=*']
    run = subprocess.run(git, cwd=Path(__file__).parent, capture_output=True, text=True)
    return run.stdout.strip() or 'unknown'
