"""torch.distributed's backend "ringfold", for tensors on the CPU and on CUDA.

    import torch.distributed as dist
    import ringfold.torch                       # torch 2.5 and newer find it without
    dist.init_process_group("ringfold")

The backend is compiled against the installed torch when the first process group is made (a minute), and
kept in $RINGFOLD_TORCH_CACHE or ~/.cache/ringfold/torch. Needs a C++20 compiler.
"""
from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist

__all__ = ["monitored_barrier"]


def _create(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    from . import _build

    return _build.load().create(store, rank, size, timeout)


def monitored_barrier(group: Any = None, timeout: timedelta | None = None,
                      wait_all_ranks: bool = False) -> None:
    """As torch.distributed.monitored_barrier, which takes groups of gloo only: rank 0 waits for the
    others and names who does not come."""
    group = group if group is not None else dist.group.WORLD
    backend = group._get_backend(dist.distributed_c10d._get_pg_default_device(group))
    backend.monitored_barrier(timeout or dist.distributed_c10d.default_pg_timeout, wait_all_ranks)


if dist.is_available() and "ringfold" not in dist.Backend.backend_list:
    dist.Backend.register_backend("ringfold", _create, devices=["cpu", "cuda"])
