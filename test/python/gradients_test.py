"""The gradient synchroniser from Python."""
import gc

import ml_dtypes
import numpy as np
import pytest
import readme_blocks
import ringfold

RANKS = 3


def on_ranks(fn, ranks=RANKS):
    return ringfold.run(fn, ranks=ranks, timeout=100)


def refused(code, words, call, *arguments, **options):
    with pytest.raises(ringfold.Error) as caught:
        call(*arguments, **options)
    assert caught.value.code == code
    for word in words.split("|"):
        assert word in caught.value.text, caught.value.text


def step(sync, names, weight=None):
    sync.begin(weight)
    for name in names:
        sync.ready(name)
    sync.finish()


def steps(comm):
    mine = np.empty(1000, "f4")
    sync = ringfold.GradientSync(comm, {"mine": mine, "bucket": ((20, 30), "f8"),
                                        "half": ((7,), ml_dtypes.bfloat16)},
                                 first_bytes=1 << 12, bucket_bytes=1 << 12)
    bucket, half = sync.gradient("bucket"), sync.gradient("half")
    assert sync.gradient("mine") is mine
    assert bucket.shape == (20, 30) and bucket.dtype == "f8" and (bucket == 0).all()
    assert half.dtype == ml_dtypes.bfloat16

    def fill():
        mine[:], bucket[:], half[:] = comm.rank, 10 * comm.rank, comm.rank + 1

    fill()
    step(sync, ["half", "bucket", "mine"])
    assert (mine == 1).all() and (bucket == 10).all() and (half == 2).all()
    report = sync.report()
    assert report.divisor == comm.size and report.unused == [] and report.buckets == 3
    assert report.gradient_bytes == 1000 * 4 + 600 * 8 + 7 * 2 and report.copied_bytes == 0

    fill()  # rank r has r samples: rank 0 has no data, and its gradients do not count
    step(sync, ["bucket", "mine", "half"] if comm.rank else [], weight=comm.rank)
    assert np.allclose(mine, 5 / 3) and np.allclose(bucket, 50 / 3)
    assert sync.report().divisor == 3

    fill()
    step(sync, ["half"] if comm.rank else ["half", "mine"])  # "mine" counts as zeros elsewhere
    assert (mine == 0).all() and (half == 2).all()
    assert sync.report().unused == (["mine", "bucket"] if comm.rank else ["bucket"])

    sync.accumulate(True)
    fill()
    sent = comm.bytes_sent
    step(sync, ["mine", "bucket", "half"])
    assert (mine == comm.rank).all() and comm.bytes_sent == sent
    sync.accumulate(False)
    mine += comm.rank
    step(sync, ["mine", "bucket", "half"])
    assert (mine == 2).all() and (bucket == 10).all()

    sync.close()
    del sync
    gc.collect()
    bucket += 1  # bucket storage stays
    assert (bucket == 11).all()


def test_steps():
    on_ranks(steps)


def compressed(comm):
    for compression, exact in [("bf16", True), ("f16", True), ("i8", False), ("f8e4m3", False)]:
        x = np.full(40000, comm.rank + 1, "f4")
        with ringfold.GradientSync(comm, {"x": x}, compression=compression) as sync:
            step(sync, ["x"])
            report = sync.report()
        assert np.allclose(x, 2, rtol=0 if exact else 0.05), compression
        assert 0 < report.bytes_sent < (0.55 if exact else 0.3) * 2 * report.gradient_bytes
    x = np.arange(1000, dtype="f4")
    with ringfold.GradientSync(comm, {"x": x}, compression="sparse", sparse_share=0.25) as sync:
        step(sync, ["x"])
    assert np.allclose(x[750:], np.arange(750, 1000)) and (x[:750] == 0).all()


def test_compression():
    on_ranks(compressed)


def fails(comm):
    names = ["a", "b"] if comm.rank != 1 else ["b", "a"]  # C23
    refused("mismatch", "'a'|'b'", ringfold.GradientSync, comm,
            {name: np.zeros(4, "f4") for name in names})
    x = np.zeros(4, "f4")
    sync = ringfold.GradientSync(comm, {"x": x, "y": x.copy()}, require_all=True)
    refused("invalid_argument", "there is no gradient 'z'", sync.ready, "z")
    refused("invalid_argument", "begin() comes first", sync.ready, "x")
    sync.begin()
    sync.ready("x")
    refused("invalid_argument", "'x'|second time", sync.ready, "x")
    if comm.rank == 1:
        refused("invalid_argument", "not ready at finish(): parameter 1 'y'", sync.finish)
    else:
        sync.ready("y")
        refused("aborted", "rank 1", sync.finish)
    sync.close()
    refused("invalid_argument", "was closed", sync.begin)


def test_errors():
    on_ranks(fails)


def raises_in_a_step(comm):
    sync = ringfold.GradientSync(comm, {"x": np.zeros(4, "f4")})
    try:
        with sync:
            sync.begin()
            if comm.rank == 2:
                raise ValueError("bad batch")
            sync.ready("x")
            sync.finish()
    except ringfold.Error as error:
        return error.code, "bad batch" in error.text
    except ValueError:
        return "raised"


def test_a_block_that_raises_aborts():
    assert on_ranks(raises_in_a_step) == [("aborted", True), ("aborted", True), "raised"]


def test_refusals():
    comm = ringfold.init(id=ringfold.unique_id())
    x = np.zeros((4, 4), "f4")
    refused("invalid_argument", "x is not contiguous", ringfold.GradientSync, comm, {"x": x[:, :1]})
    refused("invalid_argument", "i32", ringfold.GradientSync, comm, {"x": np.zeros(3, "i4")})
    refused("invalid_argument", "compression is \"zip\"", ringfold.GradientSync, comm, {"x": x},
            compression="zip")

    class OnDevice:
        __cuda_array_interface__ = {"shape": (4,), "typestr": "<f4", "data": (4096, False), "version": 3}

    refused("unsupported", "x is device memory", ringfold.GradientSync, comm, {"x": OnDevice()})


def test_the_readmes_program(tmp_path):
    told = readme_blocks.told_by_ranks(tmp_path, "GradientSync", ranks=2)
    assert sorted(told) == [f"rank {r}: [5.], [ 0.5 10. ], divisor 2.0" for r in range(2)]
