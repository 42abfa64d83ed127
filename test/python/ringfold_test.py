"""The Python package: arrays, collectives, errors, waiting, run()."""
import ctypes
import gc
import os
import signal
import subprocess
import sys
import threading
import time
import weakref

import ml_dtypes
import numpy as np
import pytest
import readme_blocks
import ringfold

RANKS = 3


def alone():
    return ringfold.init(id=ringfold.unique_id())


def on_ranks(fn, ranks=RANKS, args=()):
    return ringfold.run(fn, ranks=ranks, args=args, timeout=100)


# ---- Collectives ----

def every_collective(comm):
    n, r = comm.size, comm.rank
    x = np.arange(6, dtype="f4").reshape(2, 3) + r
    everyone = np.stack([np.arange(6, dtype="f4").reshape(2, 3) + i for i in range(n)])
    same = np.testing.assert_array_equal
    same(comm.all_reduce(x), everyone.sum(0))
    same(comm.all_reduce(x, op="avg"), everyone.mean(0))
    same(comm.all_reduce(x, op="max"), everyone.max(0))
    same(comm.all_reduce(x, op="min"), everyone.min(0))
    same(comm.all_reduce(x, op="prod"), everyone.prod(0))
    same(comm.all_reduce(x, op="premul_sum", factor=r + 1.0),
         sum(everyone[i] * (i + 1) for i in range(n)))
    own = x.copy()
    assert comm.all_reduce(own, out=own) is own
    same(own, everyone.sum(0))
    same(comm.all_gather(x), everyone)
    gathered = comm.gather(x, root=1)
    assert (gathered is None) == (r != 1)
    if r == 1:
        same(gathered, everyone)
    reduced = comm.reduce(x, root=n - 1)
    assert (reduced is None) == (r != n - 1)
    if r == n - 1:
        same(reduced, everyone.sum(0))
    parts = np.arange(2 * n, dtype="i8").reshape(n, 2)
    same(comm.reduce_scatter(parts * (r + 1)), parts[r:r + 1] * (n * (n + 1) // 2))
    out = np.empty(2, "i8")
    same(comm.scatter(parts if r == 0 else None, out), parts[r])
    same(comm.all_to_all(np.arange(n, dtype="i4") + 10 * r),
         np.array([10 * i + r for i in range(n)], "i4"))
    y = x.copy()
    same(comm.broadcast(y, root=1), everyone[1])
    if r == 0:
        comm.send(x, to=n - 1)
    elif r == n - 1:
        same(comm.recv(np.empty_like(x), source=0), everyone[0])
    comm.barrier()
    part = comm.split(color=0 if r != 1 else -1, key=-r)
    assert (part is None) == (r == 1)
    if part is not None:
        same(part.all_gather(np.array([r])), np.array([[i] for i in reversed(range(n)) if i != 1]))
        part.close()
    if r != 1:
        with comm.shrink([1]) as smaller:
            assert (smaller.rank, smaller.size) == ([0, -1, 1][r], n - 1)
            same(smaller.all_reduce(np.array([r])), np.array([n - 1]))
    return comm.transport


def test_every_collective():
    assert on_ranks(every_collective) == ["region"] * RANKS


TYPES = ["int8", "uint8", "int32", "uint32", "int64", "uint64", "float16", "float32", "float64",
         ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2]


def every_type(comm):
    for name in TYPES:
        for shape in ((), (0,), (1,), (7,), (3, 5)):
            x = np.full(shape, comm.rank + 1, dtype=name)
            total = comm.all_reduce(x)
            assert total.dtype == x.dtype and total.shape == x.shape
            assert (total.astype("f8") == sum(range(1, comm.size + 1))).all(), (name, shape)
    moved = [np.array([comm.rank + 0.5j, 2], "c8"), np.array([True, comm.rank == 1]),
             np.array([comm.rank], "i2"), np.array([b"rank%d" % comm.rank]),
             bytearray(b"%d" % comm.rank)]
    for x in moved:
        comm.broadcast(x, root=1)
    assert moved[0][0] == 1 + 0.5j and moved[1].all() and moved[2] == 1
    assert moved[3][0] == b"rank1" and moved[4] == b"1"
    assert comm.all_reduce(np.array([1 + 2j * comm.rank]))[0] == comm.size + 2j * 3
    assert comm.all_reduce(np.array([comm.rank == 2]), op="max")[0]


def test_every_type():
    on_ranks(every_type)


def fp16_averages(comm):  # C57: neither the sum overflows nor do small values vanish
    return [float(comm.all_reduce(np.array([value], "f2"), op="avg")[0])
            for value in (40000, 2**-24)]


def test_fp16_averages():
    assert on_ranks(fp16_averages, 4) == [[40000.0, 2.0**-24]] * 4


# ---- What is refused ----

def refused(code, words, call, *arguments, **options):
    with pytest.raises(ringfold.Error) as caught:
        call(*arguments, **options)
    assert caught.value.code == code
    for word in words.split("|"):
        assert word in caught.value.text, caught.value.text
    assert str(caught.value) == f"{code}: {caught.value.text}"


def test_refusals():
    comm = alone()
    x = np.zeros((4, 4), "f4")
    bad = "invalid_argument"
    refused(bad, "x is not contiguous|4x1|16, 4", comm.all_reduce, x[:, :1])
    refused(bad, "x is not contiguous", comm.all_reduce, x.T[1:], np.zeros((3, 4), "f4"))
    refused(bad, "out is not contiguous", comm.all_reduce, x[0], x[:, 0])
    read_only = np.zeros(4, "f4")
    read_only.flags.writeable = False
    assert (comm.all_reduce(read_only) == 0).all()
    refused(bad, "out is read-only", comm.all_reduce, read_only, out=read_only)
    refused(bad, "out is read-only", comm.recv, b"bytes", 0)
    refused(bad, 'op is "add"|sum, prod, max, min, avg, premul_sum', comm.all_reduce, x, op="add")
    refused(bad, "float32|float64|same", comm.all_reduce, x, x.astype("f8"))
    refused(bad, "16 elements|3", comm.all_reduce, x, np.zeros(3, "f4"))
    refused(bad, "other byte order", comm.all_reduce, np.zeros(2, ">f4"))
    refused(bad, "x is a list", comm.all_reduce, [1, 2], np.zeros(2))
    refused(bad, "overlap", comm.all_reduce, x.reshape(-1)[:8], x.reshape(-1)[4:12])
    refused(bad, "root 7", comm.broadcast, x, root=7)
    refused(bad, "out= is needed", comm.all_reduce, memoryview(b"12"))
    refused("unsupported", "prod is not offered for complex64", comm.all_reduce,
            np.zeros(2, "c8"), op="prod")
    refused("unsupported", "sum is not offered for bool", comm.all_reduce, np.zeros(2, bool))
    refused("unsupported", "int16", comm.all_reduce, np.zeros(2, "i2"))
    refused(bad, 'algorithm is "fast"', ringfold.init, algorithm="fast")
    refused(bad, "128", ringfold.init, id=b"short")
    comm.close()
    refused(bad, "", comm.barrier)


def unlike(comm):
    try:
        comm.all_reduce(np.zeros(3 if comm.rank == 0 else 4, "f4"))
    except ringfold.Error as error:
        return error.code, error.text
    return None


def test_mismatch_is_told_on_all_ranks():
    for code, text in on_ranks(unlike):
        assert code == "mismatch" and "3" in text and "4" in text


def wrong_types_asynchronously(comm):  # C30: the error comes at the call or at the wait, on all
    try:
        comm.all_reduce(np.zeros(3, "i2"), np.zeros(3, "i2"), wait=False).wait()
    except ringfold.Error as error:
        return error.code
    return None


def test_asynchronous_errors_arrive():
    assert on_ranks(wrong_types_asynchronously) == ["unsupported"] * RANKS


# ---- DLPack and CUDA ----

class Foreign:
    """An array of another library: DLPack, and the stream that it was asked for."""

    def __init__(self, array, device=(1, 0), versions=True):
        self.array, self.device, self.versions, self.asked = array, device, versions, []

    def __dlpack_device__(self):
        return self.device

    def __dlpack__(self, **options):
        if not self.versions and "max_version" in options:
            raise TypeError("unexpected keyword argument 'max_version'")
        self.asked.append(options.pop("stream", "none"))
        return self.array.__dlpack__(**options)


@pytest.mark.parametrize("versions", [True, False])
def test_dlpack_is_not_copied(versions):
    comm = alone()
    x, out = np.arange(4.0), np.zeros(4)
    comm.all_reduce(Foreign(x, versions=versions), Foreign(out, versions=versions))
    assert (out == x).all()
    refused("invalid_argument", "not contiguous", comm.all_reduce,
            Foreign(np.zeros((3, 3))[:, 1], versions=versions), np.zeros(3))
    if versions:
        x.flags.writeable = False
        refused("invalid_argument", "read-only", comm.recv, Foreign(x), 0)


def test_dlpack_lets_go():
    comm = alone()
    x = np.arange(4.0)
    before = sys.getrefcount(x)
    comm.all_reduce(Foreign(x), np.zeros(4))
    gc.collect()
    assert sys.getrefcount(x) == before


def test_dlpack_of_cuda_is_asked_for_the_stream():
    """No GPU: host memory that says it is a device's, so only the protocol is tested."""
    comm = alone()
    x = Foreign(np.arange(4.0), device=(2, 0))
    comm.all_reduce(x, np.zeros(4))
    assert x.asked == [1]  # the default stream
    comm.all_reduce(x, np.zeros(4), stream=77)
    assert x.asked == [1, 77]


class Device:
    def __init__(self, array, **more):
        self.__cuda_array_interface__ = dict(array.__array_interface__, version=3, **more)
        self.array = array


def test_cuda_array_interface():
    """The same by the other protocol."""
    comm = alone()
    x, out = np.arange(4, dtype="f4"), np.zeros(4, "f4")
    comm.all_reduce(Device(x, stream=5), Device(out, stream=5))
    assert (out == x).all()
    strided = Device(np.zeros((4, 2), "f4")[:, 0])
    refused("invalid_argument", "not contiguous", comm.all_reduce, strided, out)
    x.flags.writeable = False
    refused("invalid_argument", "read-only", comm.recv, Device(x), 0)


# ---- Waiting ----

def reports(comm):
    work = comm.all_reduce(np.ones(1 << 20, "f4"), np.empty(1 << 20, "f4"), wait=False)
    work.wait()
    return work.report()


def test_reports():
    for report in on_ranks(reports):
        assert report.factor == pytest.approx(4 / 3)
        assert report.bytes_sent == report.bytes_model > 0
        assert report.algorithm == "region" and report.steps > 0
        assert report.predicted_seconds > 0 and report.measured_seconds > 0


def waits(comm):
    if comm.rank == 1:
        comm.recv(np.empty(1), source=0)
    if comm.rank != 0:
        return comm.barrier()
    work = comm.barrier(wait=False)
    begun = time.monotonic()
    code = None
    try:
        work.wait(timeout=0.2)
    except ringfold.Error as error:
        code = error.code
    waited = time.monotonic() - begun
    done = work.done()
    comm.send(np.ones(1), to=1)
    work.wait()
    return code, waited, done, work.done()


def test_a_wait_ends_before_the_operation():
    code, waited, done, at_last = on_ranks(waits)[0]
    assert code == "timeout" and waited > 0.15 and not done and at_last


def others_run(comm):
    """The GIL is free while a rank waits: the others only come when this thread has counted meanwhile."""
    if comm.rank != 0:
        comm.recv(np.empty(1), source=0)
        comm.barrier()
        return True
    waiter = threading.Thread(target=comm.barrier)
    waiter.start()
    turns = 0
    while turns < 1000 and waiter.is_alive():
        turns += 1
    for other in range(1, comm.size):
        comm.send(np.ones(1), to=other)
    waiter.join()
    return turns == 1000


def test_the_gil_is_free():
    assert all(on_ranks(others_run))


def keeps(comm):
    """Nobody but the library holds the array, whose memory is looked at by its address."""
    if comm.rank == 1:
        comm.recv(np.empty(1), source=0)
        comm.send(np.full(1 << 16, 7.0), to=0)
    if comm.rank != 0:
        return None
    out = np.zeros(1 << 16)
    gone = weakref.ref(out)
    comm.recv(out, source=1, wait=False)  # the Work is dropped at once
    del out
    gc.collect()
    alive = gone() is not None
    comm.send(np.ones(1), to=1)  # only now does the other send
    limit = time.monotonic() + 20
    while gone() is not None and time.monotonic() < limit:
        time.sleep(0.01)
    return alive, gone() is None


def test_buffers_live_until_the_operation_ends():
    assert on_ranks(keeps)[0] == (True, True)


INTERRUPTED = """
import _thread, threading
import numpy, ringfold
def fn(comm):
    if comm.rank == 1:
        comm.recv(numpy.empty(1), source=0)
        comm.barrier()
        return True
    work = comm.barrier(wait=False)
    try:
        threading.Timer(0.2, _thread.interrupt_main).start()
        work.wait()
    except KeyboardInterrupt:
        assert not work.done()
        comm.send(numpy.ones(1), to=1)  # only now does the other come: the operation goes on, and ends
        work.wait()
        return True
    return False
print(ringfold.run(fn, ranks=2))
"""


def test_keyboard_interrupt_ends_a_wait():
    done = subprocess.run([sys.executable, "-c", INTERRUPTED], capture_output=True, text=True,
                          timeout=100, check=False)
    assert done.stdout.strip() == "[True, True]", done.stderr


def test_keyboard_interrupt_ends_the_start():
    code = ("import ringfold\n"
            "try:\n"
            "  print('begins', flush=True)\n"
            "  ringfold.init(id=ringfold.unique_id(), rank=0, size=2, start_timeout=300)\n"
            "except KeyboardInterrupt: print('interrupted')\n")
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "begins\n"
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=20)[0].strip() == "interrupted"


def aborts(comm):
    if comm.rank == 1:
        time.sleep(0.1)
        comm.abort("enough")
    codes = []
    for call in (comm.barrier, comm.health):
        try:
            call()
        except ringfold.Error as error:
            codes.append((error.code, "enough" in error.text))
    return codes


def test_abort():
    assert on_ranks(aborts) == [[("aborted", True)] * 2] * RANKS


# ---- run() ----

def test_run_of_closures_and_lambdas():
    offset = 10
    assert ringfold.run(lambda comm, x: (comm.rank + offset) * x, ranks=2, args=(3,)) == [30, 33]
    assert ringfold.run(lambda comm: comm.size, ranks=1) == [1]
    refused("invalid_argument", "ranks is 0", ringfold.run, print, ranks=0)


def test_run_carries_exceptions_with_the_rank():
    def fails(comm):
        if comm.rank == 2:
            raise KeyError("mine")
        comm.barrier()  # ends with the other's abort

    with pytest.raises(ringfold.RankError, match="rank 2: KeyError") as caught:
        ringfold.run(fails, ranks=3)
    assert caught.value.rank == 2
    assert isinstance(caught.value.__cause__, KeyError)
    assert "in fails" in caught.value.text


def test_run_tells_of_a_killed_rank():
    def dies(comm):
        if comm.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        comm.barrier()

    with pytest.raises(ringfold.RankError, match="rank 1: the process ended by signal SIGKILL"):
        ringfold.run(dies, ranks=3)


def test_run_has_a_time_limit_and_leaves_nothing():
    def sleeps(comm):
        time.sleep(60)

    with pytest.raises(TimeoutError, match="rank 0"):
        ringfold.run(sleeps, ranks=2, timeout=3)
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)


def test_a_block_that_raises_aborts():
    def raises(comm):
        part = comm.split(0)
        if comm.rank == 0:
            try:
                with part:
                    raise ValueError("no more")
            except ValueError:
                return "ValueError"
        try:
            part.barrier()
        except ringfold.Error as error:
            return error.code, "no more" in error.text
        return None

    assert ringfold.run(raises, ranks=2) == ["ValueError", ("aborted", True)]


def test_a_forked_child_is_harmless():
    def forks(comm):
        child = os.fork()
        if child == 0:
            try:
                comm.barrier()
            except ringfold.Error as error:
                os._exit(0 if "forked" in error.text else 1)
            os._exit(1)
        status = os.waitpid(child, 0)[1]
        comm.barrier()
        return status

    assert ringfold.run(forks, ranks=2) == [0, 0]


def test_addresses_are_the_arrays_own():
    """Zero-copy: what lies at the array's address changes."""
    comm = alone()
    out = np.zeros(3)
    memory = (ctypes.c_double * 3).from_address(out.ctypes.data)
    comm.all_reduce(np.arange(3.0), out=out)
    assert list(memory) == [0.0, 1.0, 2.0]


def test_the_readmes_program(tmp_path):
    told = readme_blocks.told_by_ranks(tmp_path, "comm.all_reduce(gradient", ranks=3)
    assert sorted(told) == [f"rank {rank}: [  1.  10. 100.], 2(N-1)/N = 1.333" for rank in range(3)]
