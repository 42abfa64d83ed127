"""What users train with, unmodified, on ringfold and on gloo: the same losses within float error, and
bit-identical parameters on all ranks."""
import hashlib
import os
import re
import subprocess
import sys

import pytest
import readme_blocks
import torch
import torch.distributed as dist
import transformer
from torch_ranks import on_ranks

STEPS = 8


def averaged(loss):
    total = loss.detach().clone()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def bits(parameters):
    """A name for their content that differs if a bit does."""
    whole = hashlib.sha256()
    for parameter in parameters:
        whole.update(parameter.detach().contiguous().numpy().tobytes())
    return whole.hexdigest()


def trained(rank, size, model, parameters, optimizer):
    losses = []
    for inputs, targets in transformer.batches(rank, size, STEPS):
        optimizer.zero_grad()
        loss = transformer.loss_of(model, inputs, targets)
        loss.backward()
        optimizer.step()
        losses.append(averaged(loss))
    return losses, bits(parameters())


def ddp(rank, size, hook=None, bucket=0.1):
    plain = transformer.made()
    model = torch.nn.parallel.DistributedDataParallel(plain, bucket_cap_mb=bucket)
    if hook is not None:
        hook(model)
    return trained(rank, size, model, plain.parameters,
                   torch.optim.SGD(plain.parameters(), lr=0.3, momentum=0.9))


def ddp_with_fp16_hook(rank, size):
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
    return ddp(rank, size, lambda model: model.register_comm_hook(None, default_hooks.fp16_compress_hook))


def ddp_with_power_sgd(rank, size):
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power

    def hook(model):
        state = power.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)
        model.register_comm_hook(state, power.powerSGD_hook)

    # One bucket: the hook starts more collectives in callbacks, and on the CPU nothing orders those of
    # several buckets (gloo ends the process then).
    return ddp(rank, size, hook, bucket=25)


def zero_1(rank, size):
    from torch.distributed.optim import ZeroRedundancyOptimizer
    plain = transformer.made()
    model = torch.nn.parallel.DistributedDataParallel(plain)
    optimizer = ZeroRedundancyOptimizer(plain.parameters(), torch.optim.Adam, lr=1e-3)
    return trained(rank, size, model, plain.parameters, optimizer)


def fsdp_2(rank, size):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    model = transformer.made()
    mesh = init_device_mesh("cpu", (size,))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return trained(rank, size, model,
                   lambda: [parameter.full_tensor() for parameter in model.parameters()],
                   torch.optim.Adam(model.parameters(), lr=1e-3))


def dtensor(rank, size):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor, DTensor
    mesh = init_device_mesh("cpu", (size,))
    whole = torch.arange(35.0).reshape(5, 7)
    rows = distribute_tensor(whole, mesh, [Shard(0)])
    columns = rows.redistribute(mesh, [Shard(1)])
    assert torch.equal(columns.to_local(), whole.chunk(size, 1)[rank])
    assert torch.equal(columns.redistribute(mesh, [Replicate()]).to_local(), whole)
    parts = DTensor.from_local(whole.clone(), mesh, [Partial()])
    assert torch.equal(parts.redistribute(mesh, [Replicate()]).to_local(), whole * size)
    assert torch.equal(parts.redistribute(mesh, [Shard(0)]).full_tensor(), whole * size)
    product = rows @ distribute_tensor(whole.T.contiguous(), mesh, [Replicate()])
    return [product.full_tensor().sum().item()], bits([product.full_tensor()])


def pipeline(rank, size):
    """Half of the model on each rank, microbatches between them."""
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
    torch.manual_seed(3)
    halves = [torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh()) for _ in range(size)]
    x, y = torch.randn(8, 8), torch.randn(8, 8)
    stage = PipelineStage(halves[rank], rank, size, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, n_microbatches=4, loss_fn=torch.nn.functional.mse_loss)
    losses = []
    if rank == 0:
        schedule.step(x)
    else:
        schedule.step(target=y, losses=losses)
    whole = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh())
                                  for _ in range(size)))
    for mine, theirs in zip(whole, halves):
        mine.load_state_dict(theirs.state_dict())
    micro = [torch.nn.functional.mse_loss(whole(a), b) for a, b in zip(x.chunk(4), y.chunk(4))]
    (sum(micro) / 4).backward()
    for mine, theirs in zip(whole[rank].parameters(), halves[rank].parameters()):
        torch.testing.assert_close(theirs.grad, mine.grad)
    return [sum(micro).item() / 4], "the same"


WAYS = [ddp, ddp_with_fp16_hook, ddp_with_power_sgd, zero_1, fsdp_2, dtensor, pipeline]


def all_ways(rank, size):
    return {way.__name__: way(rank, size) for way in WAYS}


@pytest.fixture(scope="module")
def outcomes():
    return {backend: on_ranks(all_ways, ranks=2, backend=backend, limit=400)
            for backend in ("ringfold", "gloo")}


@pytest.mark.parametrize("way", [way.__name__ for way in WAYS])
def test_trains_like_gloo(outcomes, way):
    ours = [outcome[way] for outcome in outcomes["ringfold"]]
    theirs = [outcome[way] for outcome in outcomes["gloo"]]
    assert len({content for _, content in ours}) == 1  # alike on all ranks, to the bit
    losses, reference = ours[0][0], theirs[0][0]
    print(way, losses, reference)
    # Two ranks add two numbers: in one order, so the backends round alike, and errors do not grow.
    assert losses == pytest.approx(reference, rel=1e-5)
    if way in ("ddp", "zero_1", "fsdp_2"):
        assert losses[-1] < losses[0] - 0.5  # it learns


def launched(script, ranks):
    """What torchrun's ranks printed, a text a rank: torchrun starts them unbuffered, so that a text and
    its newline are two writes to the pipe they share, and another rank's text may come between."""
    done = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone",
                           "--nproc-per-node", str(ranks), script], capture_output=True, text=True,
                          env=dict(os.environ, OMP_NUM_THREADS="1"), check=False)
    texts = sorted(text for text in re.split("\n|(?=rank )", done.stdout) if text)
    return texts, done.stderr


def test_torchrun(tmp_path):
    """The plain launcher, with the backend's name only."""
    script = tmp_path / "train.py"
    script.write_text("""
import ringfold.torch, torch, torch.distributed as dist
dist.init_process_group("ringfold")
x = torch.tensor([dist.get_rank() + 1.0])
dist.all_reduce(x, op=dist.ReduceOp.AVG)
print(f"rank {dist.get_rank()} of {dist.get_world_size()} has {x.item()}")
dist.destroy_process_group()
""")
    texts, errors = launched(script, 2)
    assert texts == ["rank 0 of 2 has 1.5", "rank 1 of 2 has 1.5"], errors


def test_the_readmes_program(tmp_path):
    program = tmp_path / "train.py"
    program.write_text(readme_blocks.block("import torch"))
    texts, errors = launched(program, 3)
    assert texts == [f"rank {rank}: [[8.0, 8.0, 8.0, 8.0]]" for rank in range(3)], errors
