"""Several processes on one CPU, as torchrun would start them, forked: nothing is imported again."""

import multiprocessing
import os
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist


def start(rank: int, count: int, meeting: Path, body: Callable[[], object], results) -> None:
    try:
        torch.set_num_threads(1)
        wait = timedelta(seconds=300)
        address = f"file://{meeting}"
        dist.init_process_group(
            "gloo", init_method=address, rank=rank, world_size=count, timeout=wait
        )
        results.put((rank, body(), None))
        dist.barrier()
    except BaseException:
        results.put((rank, None, traceback.format_exc()))
    results.close()
    results.join_thread()
    os._exit(0)


def on_processes(count: int, meeting: Path, body: Callable[[], object]) -> list:
    """What `body` returns in each of `count` processes that share a group."""
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    arguments = count, meeting, body, results
    started = [context.Process(target=start, args=(r, *arguments)) for r in range(count)]
    for process in started:
        process.start()
    found = [results.get(timeout=400) for _ in started]
    for process in started:
        process.join()
    for _, _, error in found:
        assert error is None, error
    return [value for _, value, _ in sorted(found, key=lambda each: each[0])]
