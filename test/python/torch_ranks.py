"""Ranks with a process group of torch, for tests."""
import functools
import os
import tempfile
from datetime import timedelta

import ringfold


def on_ranks(fn, ranks=3, backend="ringfold", args=(), timeout=60.0, limit=300):
    """fn(rank, size, *args) on each, in the default process group; what they return, by rank."""
    with tempfile.TemporaryDirectory() as folder:
        body = functools.partial(_body, fn, backend, os.path.join(folder, "store"), args, timeout)
        return ringfold.run(body, ranks=ranks, timeout=limit)


def _body(fn, backend, store, args, timeout, comm):
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    if backend == "ringfold":
        import ringfold.torch  # noqa: F401  (registers it)
    dist.init_process_group(backend, init_method=f"file://{store}", rank=comm.rank,
                            world_size=comm.size, timeout=timedelta(seconds=timeout))
    try:
        return fn(comm.rank, comm.size, *args)
    finally:
        dist.destroy_process_group()
