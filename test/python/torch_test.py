"""ringfold.torch: what c10d offers, on CPU tensors. CUDA tensors are not tested: there is no GPU."""
import os
import subprocess
import sys
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch_ranks import on_ranks

TYPES = [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.float16,
         torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128,
         torch.float8_e4m3fn, torch.float8_e5m2]


def layouts(like):
    """The same values in memory of many kinds."""
    yield like.clone()
    yield torch.empty(like.shape[::-1], dtype=like.dtype).T.copy_(like)
    yield torch.empty((*like.shape, 2), dtype=like.dtype)[..., 0].copy_(like)
    yield torch.empty(like.shape[0] * 2, like.shape[1] + 3, dtype=like.dtype)[::2, 1:-2].copy_(like)


def same(got, wanted):
    torch.testing.assert_close(got, wanted, rtol=0, atol=0)


def every_type_and_layout(rank, size):
    for dtype in TYPES:
        mine = (torch.arange(6) % 3 + rank).reshape(2, 3).to(dtype)
        total = (torch.arange(6) % 3 * size + sum(range(size))).reshape(2, 3).to(dtype)
        everyone = [(torch.arange(6) % 3 + r).reshape(2, 3).to(dtype) for r in range(size)]
        for i, x in enumerate(layouts(mine)):
            dist.all_reduce(x)
            assert x.dtype == dtype and torch.equal(x.to(torch.complex128), total.to(torch.complex128)), (dtype, i, x)
        for x in layouts(mine):
            outs = [next(layouts(torch.zeros_like(mine))) for _ in range(size)]
            outs[0] = torch.zeros(3, 2, dtype=dtype).T
            dist.all_gather(outs, x)
            for out, wanted in zip(outs, everyone):
                assert torch.equal(out.to(torch.complex128), wanted.to(torch.complex128))
        for x in layouts(mine):
            dist.broadcast(x, src=1)
            assert torch.equal(x.to(torch.complex128), everyone[1].to(torch.complex128))
        for shape in ((0,), (0, 3), ()):
            x = torch.ones(shape, dtype=dtype)
            dist.all_reduce(x)
            assert x.shape == shape and (x.to(torch.complex64) == size).all()


def every_collective(rank, size):
    x = torch.arange(4.0) + rank
    every = torch.stack([torch.arange(4.0) + r for r in range(size)])
    for op, wanted in ((dist.ReduceOp.SUM, every.sum(0)), (dist.ReduceOp.AVG, every.mean(0)),
                       (dist.ReduceOp.PRODUCT, every.prod(0)), (dist.ReduceOp.MIN, every.amin(0)),
                       (dist.ReduceOp.MAX, every.amax(0)),
                       (dist._make_nccl_premul_sum(0.5), every.sum(0) / 2),
                       (dist._make_nccl_premul_sum(torch.tensor([2.0])), every.sum(0) * 2)):
        y = x.clone()
        dist.all_reduce(y, op=op)
        same(y, wanted)
    y = x.clone()
    work = dist.all_reduce(y, async_op=True)
    work.wait()
    assert work.is_completed() and work.is_success()
    same(y, every.sum(0))
    y = x.clone()
    dist.reduce(y, dst=1)
    same(y, every.sum(0) if rank == 1 else x)
    gathered = [torch.zeros(4) for _ in range(size)] if rank == 2 else None
    dist.gather(x, gathered, dst=2)
    if rank == 2:
        same(torch.stack(gathered), every)
    out = torch.zeros(4)
    dist.scatter(out, list(every.unbind()) if rank == 0 else None, src=0)
    same(out, x)
    flat = torch.empty(4 * size)
    dist.all_gather_into_tensor(flat, x)
    same(flat, every.reshape(-1))
    stacked = torch.empty(size, 4)
    dist.all_gather_into_tensor(stacked, x)
    same(stacked, every)
    whole = torch.arange(float(2 * size)) * (rank + 1)
    factor = size * (size + 1) / 2
    out = torch.empty(2)
    dist.reduce_scatter_tensor(out, whole, op=dist.ReduceOp.AVG)
    same(out, torch.arange(float(2 * size))[2 * rank:2 * rank + 2] * (factor / size))
    dist.reduce_scatter(out, list(whole.chunk(size)))
    same(out, torch.arange(float(2 * size))[2 * rank:2 * rank + 2] * factor)
    uneven = [torch.full((r + 1,), float(rank)) for r in range(size)]
    out = torch.empty(rank + 1)
    dist.reduce_scatter(out, uneven)
    same(out, torch.full((rank + 1,), float(sum(range(size)))))
    outs = [torch.empty(r + 1) for r in range(size)]
    dist.all_gather(outs, torch.full((rank + 1,), float(rank)))
    for r in range(size):
        same(outs[r], torch.full((r + 1,), float(r)))
    out = torch.empty(size)
    dist.all_to_all_single(out, torch.arange(float(size)) + 10 * rank)
    same(out, torch.arange(float(size)) * 10 + rank)
    # To rank r go r + 1 rows.
    rows = torch.cat([torch.full((r + 1, 2), 10.0 * rank + r) for r in range(size)])
    out = torch.empty(size * (rank + 1), 2)
    dist.all_to_all_single(out, rows, [rank + 1] * size, [r + 1 for r in range(size)])
    same(out, torch.cat([torch.full((rank + 1, 2), 10.0 * r + rank) for r in range(size)]))
    ins = [torch.full((r + 1,), 10.0 * rank + r) for r in range(size)]
    outs = [torch.empty(rank + 1) for _ in range(size)]
    dist.all_to_all(outs, ins)
    for r in range(size):
        same(outs[r], torch.full((rank + 1,), 10.0 * r + rank))
    dist.barrier()


def messages(rank, size):
    right, left = (rank + 1) % size, (rank - 1) % size
    out = torch.empty(5)
    if rank % 2 == 0:
        dist.send(torch.full((5,), float(rank)), right)
        dist.recv(out, left)
    else:
        dist.recv(out, left)
        dist.send(torch.full((5,), float(rank)), right)
    same(out, torch.full((5,), float(left)))
    for works in (dist.batch_isend_irecv([dist.P2POp(dist.isend, torch.full((5,), 2.0 * rank), right),
                                          dist.P2POp(dist.irecv, out, left)]),):
        for work in works:
            work.wait()
    same(out, torch.full((5,), 2.0 * left))
    strided = torch.zeros(5, 2)
    for work in [dist.irecv(strided[:, 1], left), dist.isend(torch.arange(10.0)[::2], right)]:
        work.wait()
    same(strided, torch.stack([torch.zeros(5), torch.arange(10.0)[::2]], 1))
    with pytest.raises(RuntimeError, match="tags"):
        dist.isend(out, right, tag=3)


def coalesced(rank, size):
    xs = [torch.full((n,), float(rank)) for n in (1, 3, 1000)]
    with dist._coalescing_manager():
        for x in xs:
            dist.all_reduce(x)
    for x in xs:
        same(x, torch.full_like(x, sum(range(size))))
    outs = [torch.empty(size * n) for n in (2, 5)]
    with dist._coalescing_manager(async_ops=True) as manager:
        for out in outs:
            dist.all_gather_into_tensor(out, torch.full((out.numel() // size,), float(rank)))
    manager.wait()
    for out in outs:
        same(out, torch.arange(float(size)).repeat_interleave(out.numel() // size))


def several_gathers(rank, size):
    outs = [[torch.empty(2), torch.empty(1, 3)] for _ in range(size)]
    inputs = [torch.full((2,), float(rank)), torch.full((1, 3), 10.0 * rank)]
    dist.group.WORLD._get_backend(torch.device("cpu")).allgather_coalesced(outs, inputs).wait()
    for r in range(size):
        same(outs[r][0], torch.full((2,), float(r)))
        same(outs[r][1], torch.full((1, 3), 10.0 * r))


def objects(rank, size):
    every = [None] * size
    dist.all_gather_object(every, {"rank": rank, "text": "x" * rank * 100})
    assert [each["rank"] for each in every] == list(range(size))
    told = [f"from {rank}", rank]
    dist.broadcast_object_list(told, src=1)
    assert told == ["from 1", 1]
    gathered = [None] * size if rank == 0 else None
    dist.gather_object((rank,), gathered, dst=0)
    assert rank != 0 or gathered == [(r,) for r in range(size)]
    mine = [None]
    dist.scatter_object_list(mine, [f"for {r}" for r in range(size)] if rank == 2 else None, src=2)
    assert mine == [f"for {rank}"]


def groups(rank, size):
    pairs = [dist.new_group([0, 2]), dist.new_group([1, 2])]
    for ranks, group in zip(([0, 2], [1, 2]), pairs):
        if rank in ranks:
            x = torch.tensor([float(rank)])
            dist.all_reduce(x, group=group)
            assert x.item() == sum(ranks)
    for group in pairs:
        if dist.get_rank(group) >= 0:
            dist.destroy_process_group(group)
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    assert backend.name() == "ringfold" and backend.supports_coalescing


def booleans_complex_and_refusals(rank, size):
    for op, wanted in ((dist.ReduceOp.SUM, [True, True, False]), (dist.ReduceOp.MAX, [True, True, False]),
                       (dist.ReduceOp.PRODUCT, [True, False, False]), (dist.ReduceOp.MIN, [True, False, False])):
        x = torch.tensor([True, rank == 1, False])
        dist.all_reduce(x, op=op)
        assert x.tolist() == wanted, op
    negated = torch.tensor([1 + 1j * rank, 2]).conj().imag  # a view whose values are not in memory
    outs = [torch.empty(2) for _ in range(size)]
    dist.all_gather(outs, negated)
    assert negated.is_neg() and [out.tolist() for out in outs] == [[-r, 0] for r in range(size)]
    x = torch.ones(3)
    for words, call in (
            ("share memory", lambda: dist.all_reduce(torch.ones(1).expand(4))),
            ("bool", lambda: dist.all_reduce(torch.ones(2, dtype=torch.bool), op=dist.ReduceOp.AVG)),
            ("bitwise", lambda: dist.all_reduce(torch.ones(2, dtype=torch.int32), op=dist.ReduceOp.BXOR)),
            ("sparse", lambda: dist.all_reduce(torch.eye(2).to_sparse())),
            ("8 elements are not 3 times 3", lambda: dist.all_gather_into_tensor(torch.empty(8), x)),
            ("split sizes", lambda: dist.all_to_all_single(torch.empty(3), x, [1, 1, 2], [1, 1, 1]))):
        with pytest.raises((RuntimeError, ValueError), match=words):
            call()
    leaf = torch.ones(2, 2, requires_grad=True)
    dist.all_reduce(leaf.T)  # copied back below autograd
    same(leaf.detach(), torch.full((2, 2), float(size)))


def transposed_on_one_rank(rank, size):  # C67
    values = torch.arange(6.0).reshape(2, 3)
    x = torch.empty(3, 2).T.copy_(values) if rank == 1 else values.clone()
    dist.all_reduce(x)
    same(x.contiguous(), values * size)
    table = torch.zeros(4, 3)
    table[:, 1] = rank + 1
    dist.all_reduce(table[:, 1])
    same(table[:, 1].contiguous(), torch.full((4,), float(size * (size + 1) // 2)))
    assert (table[:, ::2] == 0).all()


def fp16_averages(rank, size):  # C57
    for value in (40000, 2**-24):
        x = torch.tensor([value], dtype=torch.float16)
        dist.all_reduce(x, op=dist.ReduceOp.AVG)
        assert x.item() == value


def futures(rank, size):
    x = torch.full((1000, 2), float(rank))[:, 0]
    future = dist.all_reduce(x, async_op=True).get_future()

    def again(done):  # waits for another operation inside of a callback, as PowerSGD does
        y = done.value()[0] + 1
        return dist.all_reduce(y, async_op=True).get_future().wait()[0]

    total = sum(range(size))
    same(future.then(again).wait(), torch.full((1000,), float((total + 1) * size)))
    same(x, torch.full((1000,), float(total)))
    chains = []
    for i in range(20):
        work = dist.all_reduce(torch.full((10,), float(i)), async_op=True)
        chains.append(work.get_future().then(lambda done: done.value()[0].sum().item()))
    assert torch.futures.wait_all(chains) == [10.0 * i * size for i in range(20)]
    x = torch.arange(8.0)[::2]
    dist.all_reduce(x, async_op=True)  # nobody waits for it, and it is copied back nevertheless
    dist.barrier()
    limit = time.monotonic() + 30
    while x[1] != 2.0 * size and time.monotonic() < limit:
        time.sleep(0.01)
    same(x, torch.arange(8.0)[::2] * size)


CHECKS = [every_type_and_layout, every_collective, messages, coalesced, several_gathers, objects, groups,
          booleans_complex_and_refusals, transposed_on_one_rank, fp16_averages, futures]


def all_checks(rank, size):
    """One start of the ranks for many checks: importing torch takes longer than they do."""
    failures = {}
    for check in CHECKS:
        try:
            check(rank, size)
        except Exception:
            import traceback
            failures[check.__name__] = traceback.format_exc()
            break  # the ranks may be apart from each other now
    return failures


@pytest.fixture(scope="module")
def outcomes():
    return on_ranks(all_checks)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_check(outcomes, check):
    names = [each.__name__ for each in CHECKS]
    for rank, failures in enumerate(outcomes):
        for name, text in failures.items():
            assert names.index(name) > names.index(check.__name__), f"rank {rank}: {text}"


def fails_and_ends(rank, size):
    import ringfold.torch
    ringfold.torch.monitored_barrier(timeout=timedelta(seconds=20))
    told = None
    try:
        if rank != 1:
            ringfold.torch.monitored_barrier(timeout=timedelta(seconds=1), wait_all_ranks=True)
    except RuntimeError as error:
        told = str(error)
    dist.barrier()  # no harm was done
    slow = torch.zeros(1)
    waited = None
    if rank == 0:
        work = dist.irecv(slow, 1)
        try:
            work.wait(timedelta(seconds=0.3))
        except RuntimeError as error:
            waited = type(error).__name__, str(error)
        dist.send(torch.ones(1), 1)
        work.wait()
        assert slow.item() == 2
    elif rank == 1:
        dist.recv(slow, 0)
        dist.send(slow * 2, 0)
    dist.barrier()
    mismatch = aborted = None
    group = dist.new_group([0, 1, 2])
    try:
        dist.all_reduce(torch.zeros(3 + rank), group=group)
    except RuntimeError as error:
        mismatch = str(error)
    group = dist.new_group([0, 1, 2])
    backend = group._get_backend(torch.device("cpu"))
    try:
        if rank == 2:
            backend.abort()
        dist.barrier(group=group)
    except RuntimeError as error:
        aborted = str(error)
    return told, waited, mismatch, aborted


def test_failures_are_told():
    for rank, (told, waited, mismatch, aborted) in enumerate(on_ranks(fails_and_ends)):
        if rank != 1:
            assert "monitored_barrier" in told and "rank 1" in told
        if rank == 0:
            assert waited[0] == "DistBackendError" and "still running" in waited[1]
        assert "all_reduce" in mismatch and "ringfold" in mismatch
        assert "aborted" in aborted


def times_out(rank, size):
    dist.barrier()
    group = dist.new_group(timeout=timedelta(seconds=4))
    store = dist.distributed_c10d._get_default_store()
    if rank == 1:
        store.wait(["over"], timedelta(seconds=60))  # comes too late
        return None
    begun = time.monotonic()
    try:
        dist.barrier(group=group)
    except RuntimeError as error:
        return time.monotonic() - begun, str(error)
    finally:
        store.set("over", "")


def test_the_groups_timeout_holds():
    seconds, text = on_ranks(times_out, ranks=2)[0]
    assert seconds > 3 and "rank 1" in text


def python(code, **environment):
    return subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True,
                          env=dict(os.environ, **environment), check=False)


def test_autoload_makes_the_backend_known_and_never_breaks_torch(tmp_path):
    entry = tmp_path / "ringfold_entry-1.dist-info"
    entry.mkdir()
    (entry / "METADATA").write_text("Metadata-Version: 2.1\nName: ringfold-entry\nVersion: 1\n")
    (entry / "entry_points.txt").write_text("[torch.backends]\nringfold = ringfold_autoload:load\n")
    path = os.pathsep.join([str(tmp_path), os.environ["PYTHONPATH"]])
    known = "import sys, torch, torch.distributed as d; print('ringfold' in d.Backend.backend_list, 'ringfold' in sys.modules)"
    assert python(known, PYTHONPATH=path).stdout.split() == ["True", "False"]
    assert python(known, PYTHONPATH=path, TORCH_DEVICE_BACKEND_AUTOLOAD="0").stdout.split()[0] == "False"
    broken = tmp_path / "ringfold"
    broken.mkdir()
    (broken / "__init__.py").write_text("raise SystemError('broken installation')")
    assert python(known, PYTHONPATH=path).stdout.split()[0] == "True"
