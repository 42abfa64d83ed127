#!/usr/bin/env python3
"""A model trained by DistributedDataParallel, with our libnccl.so.2 in place of torch's own and with
that: nccl_ddp_test.py LIBRARY [--cpu].

Two processes on the first GPU; the parameters and what other collectives give must be the same. Needs
a CUDA build of torch and a GPU, in this python or in the one named by RINGFOLD_TEST_PYTHON. --cpu
tries the script itself with any torch: both sides are gloo then.
"""
import os
import subprocess
import sys
import tempfile

RANKS = 2
# Two ranks of the real NCCL on one GPU: each as if on a host of its own.
REAL = {"NCCL_NET": "Socket", "NCCL_IB_DISABLE": "1", "NCCL_SOCKET_IFNAME": "lo", "NCCL_NET_PLUGIN": "none",
        "NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_NVLS_ENABLE": "0", "NCCL_MNNVL_ENABLE": "0",
        "NCCL_CUMEM_ENABLE": "0", "NCCL_RAS_ENABLE": "0"}
STEPS = 6


def train(rank, backend, folder):
    """One rank; its results go to FOLDER/<rank>."""
    import torch
    import torch.distributed as dist
    device = torch.device("cuda", 0) if backend == "nccl" else torch.device("cpu")
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(64, 200), torch.nn.ReLU(), torch.nn.Linear(200, 10)).to(device)
    trained = torch.nn.parallel.DistributedDataParallel(
        model, device_ids=[0] if backend == "nccl" else None, bucket_cap_mb=0.05)
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
    torch.manual_seed(100 + rank)  # each rank has samples of its own
    for _ in range(STEPS):
        samples = torch.randn(32, 64).to(device)
        loss = torch.nn.functional.cross_entropy(trained(samples), torch.randint(0, 10, (32,)).to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    results = {f"parameter {i}": p.detach().cpu() for i, p in enumerate(model.parameters())}

    mine = torch.arange(1000, dtype=torch.float32, device=device) + 1000 * rank
    summed = mine.clone()
    dist.all_reduce(summed)
    results["all_reduce"] = summed.cpu()
    gathered = [torch.empty_like(mine) for _ in range(RANKS)]
    dist.all_gather(gathered, mine)
    results["all_gather"] = torch.cat(gathered).cpu()
    root = mine.clone()
    dist.broadcast(root, 1)
    results["broadcast"] = root.cpu()
    received = torch.empty_like(mine)
    if rank == 0:
        dist.send(mine, 1)
        dist.recv(received, 1)
    else:
        dist.recv(received, 0)
        dist.send(mine, 0)
    results["send and recv"] = received.cpu()
    if backend == "nccl":
        part = torch.empty(1000 // RANKS, device=device)
        dist.reduce_scatter_tensor(part, mine)
        results["reduce_scatter"] = part.cpu()
        swapped = torch.empty_like(mine)
        dist.all_to_all_single(swapped, mine)
        results["all_to_all"] = swapped.cpu()
    dist.barrier()
    torch.save(results, os.path.join(folder, str(rank)))
    dist.destroy_process_group()


def run(python, backend, environment):
    """The results of all ranks."""
    with tempfile.TemporaryDirectory() as folder:
        ranks = [subprocess.Popen([python, "-W", "ignore", __file__, "rank", str(r), backend, folder],
                                  env={**os.environ, "NCCL_HOSTID": f"rank{r}", **environment})
                 for r in range(RANKS)]
        try:
            statuses = [rank.wait(timeout=150) for rank in ranks]
        finally:
            for rank in ranks:
                if rank.poll() is None:
                    rank.kill()
        assert statuses == [0] * RANKS, statuses
        import torch
        return [torch.load(os.path.join(folder, str(r))) for r in range(RANKS)]


def compare(ours, theirs):
    import torch
    for r, (mine, other) in enumerate(zip(ours, theirs)):
        assert mine.keys() == other.keys() and len(mine) >= 8, (mine.keys(), other.keys())
        for name in mine:
            assert torch.equal(mine[name], other[name]), (
                f"rank {r}: {name} differs by {(mine[name] - other[name]).abs().max()}")
    for name in ours[0]:
        if name.startswith("parameter"):
            assert torch.equal(ours[0][name], ours[1][name]), f"{name} differs between ranks"
    return len(ours[0])


def main():
    library, cpu = os.path.realpath(sys.argv[1]), "--cpu" in sys.argv
    python = os.environ.get("RINGFOLD_TEST_PYTHON", sys.executable)
    if subprocess.run([python, "-W", "ignore", "-c", "import torch"], capture_output=True).returncode != 0:
        print("SKIPPED nccl_ddp: no torch in", python)
        return 0
    if os.path.abspath(python) != os.path.abspath(sys.executable):  # a venv links to its base
        os.execv(python, [python, *sys.argv])
    import torch
    if cpu:
        count = compare(run(python, "gloo", {}), run(python, "gloo", {}))
    elif not torch.cuda.is_available():
        print("SKIPPED nccl_ddp: no GPU, or no CUDA build of torch in", python)
        return 0
    else:
        count = compare(run(python, "nccl", {"LD_PRELOAD": library}), run(python, "nccl", REAL))
    print(f"{count} results alike on {RANKS} ranks")
    return 0


if __name__ == "__main__":
    if sys.argv[1] == "rank":
        train(int(sys.argv[2]), sys.argv[3], sys.argv[4])
    else:
        sys.exit(main())
