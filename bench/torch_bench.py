#!/usr/bin/env python3
"""torch.distributed on ringfold and on gloo, interleaved in one run: tools/bench torch [--ranks N,N]
[--rounds N].

Both backends have a process group over the same ranks. Each round measures every size on both, one right
after the other, so that whatever disturbs the machine disturbs both; the table has the medians of the
slowest rank. The last lines are the DDP step of a transformer (test/python/transformer.py).
"""
import argparse
import functools
import os
import statistics
import sys
import tempfile
import time
from datetime import timedelta

SOURCE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
BACKENDS = ("ringfold", "gloo")
SIZES = [1 << 10, 16 << 10, 256 << 10, 4 << 20, 25 << 20]
STEPS = 4  # of training, each round


def repetitions(size):
    """Some milliseconds' worth of gloo's time."""
    return max(2, min(40, (8 << 20) // size))


def ranks_seconds(seconds):
    """The slowest rank's."""
    import torch
    import torch.distributed as dist
    slowest = torch.tensor([seconds], dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return slowest.item()


def all_reduce_seconds(group, tensor, times):
    import torch.distributed as dist
    dist.all_reduce(tensor, group=group)
    dist.barrier()
    begun = time.perf_counter()
    for _ in range(times):
        dist.all_reduce(tensor, group=group)
    return ranks_seconds((time.perf_counter() - begun) / times)


class Training:
    """Steps of DDP on one backend, or without any communication (no_sync)."""

    def __init__(self, group, width):
        import torch
        import transformer
        self.transformer = transformer
        self.model = torch.nn.parallel.DistributedDataParallel(
            transformer.made(width=width, layers=2), process_group=group)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)

    def step_seconds(self, batches, synchronised=True):
        import contextlib
        import torch.distributed as dist
        dist.barrier()
        begun = time.perf_counter()
        for inputs, targets in batches:
            self.optimizer.zero_grad()
            with contextlib.nullcontext() if synchronised else self.model.no_sync():
                self.transformer.loss_of(self.model, inputs, targets).backward()
            self.optimizer.step()
        return ranks_seconds((time.perf_counter() - begun) / len(batches))


def measure(rounds, store, comm):
    """Every rank: {(what, backend): [seconds of each round]}."""
    import ringfold.torch  # noqa: F401
    import torch
    import torch.distributed as dist
    sys.path.insert(0, os.path.join(SOURCE, "test", "python"))
    import transformer
    torch.set_num_threads(1)
    dist.init_process_group("ringfold", init_method=f"file://{store}", rank=comm.rank,
                            world_size=comm.size, timeout=timedelta(seconds=300))
    groups = {backend: dist.new_group(backend=backend) for backend in BACKENDS}
    found = {}
    tensors = {size: torch.ones(size // 4) for size in SIZES}
    width = 256
    trainings = {backend: Training(group, width) for backend, group in groups.items()}
    batches = list(transformer.batches(comm.rank, comm.size, STEPS, each=2))
    for _ in range(rounds):
        for size, tensor in tensors.items():
            for backend in BACKENDS:
                tensor.fill_(1)
                seconds = all_reduce_seconds(groups[backend], tensor, repetitions(size))
                wanted = float(comm.size) ** (repetitions(size) + 1)
                if wanted < 1e30:
                    assert (tensor == wanted).all(), f"{backend} is wrong"
                found.setdefault((size, backend), []).append(seconds)
        for backend in BACKENDS:
            found.setdefault(("step", backend), []).append(
                trainings[backend].step_seconds(batches))
        found.setdefault(("step", "none"), []).append(
            trainings["ringfold"].step_seconds(batches, synchronised=False))
    dist.destroy_process_group()
    return found


def bytes_text(size):
    return f"{size >> 20} Mi" if size >= 1 << 20 else f"{size >> 10} Ki"


def table(ranks, found):
    """Lines of the table. Communication is what a step takes longer than without any."""
    median = {key: statistics.median(values) * 1e6 for key, values in found.items()}
    yield f"# {ranks} ranks, medians in us"
    yield f"{'what':>22} {'ringfold':>10} {'gloo':>10} {'gloo / ringfold':>16}"

    def line(what, ours, theirs):
        ratio = f"{theirs / ours:.1f}" if ours > 0 else "all hidden"
        return f"{what:>22} {ours:10.0f} {theirs:10.0f} {ratio:>16}"

    for size in SIZES:
        yield line(f"all_reduce {bytes_text(size)}B", median[size, "ringfold"], median[size, "gloo"])
    yield line("DDP step", median["step", "ringfold"], median["step", "gloo"])
    without = median["step", "none"]
    yield line("of it communication", *(max(0, median["step", backend] - without)
                                        for backend in BACKENDS))


def main():
    parser = argparse.ArgumentParser(prog="tools/bench torch", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="2,4", help="numbers of ranks, default 2,4")
    parser.add_argument("--rounds", type=int, default=7)
    given = parser.parse_args()
    import ringfold
    for ranks in map(int, given.ranks.split(",")):
        with tempfile.TemporaryDirectory() as folder:
            body = functools.partial(measure, given.rounds, os.path.join(folder, "store"))
            found = ringfold.run(body, ranks=ranks, timeout=900)[0]
        for line in table(ranks, found):
            print(line, flush=True)


if __name__ == "__main__":
    main()
