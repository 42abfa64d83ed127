#!/usr/bin/env python3
"""libnccl.so.2 as vLLM uses it: opened by path, called through ctypes, one process a rank.

nccl_ctypes_test.py LIBRARY starts 2 and then 4 ranks, each a process of its own, on host memory.
Exit status 0 if every rank found everything right.
"""
import ctypes
import math
import os
import struct
import subprocess
import sys
import tempfile
import threading
import time

ncclResult_t = ctypes.c_int
ncclComm_t = ctypes.c_void_p
cudaStream_t = ctypes.c_void_p
buffer_t = ctypes.c_void_p
ncclDataType_t = ctypes.c_int
ncclRedOp_t = ctypes.c_int

SUCCESS, INVALID_ARGUMENT, INVALID_USAGE, REMOTE_ERROR, IN_PROGRESS = 0, 4, 5, 6, 7
SUM, PROD, MAX, MIN, AVG = range(5)


class ncclUniqueId(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_byte * 128)]


class Config(ctypes.Structure):  # 2.18
    _fields_ = [("size", ctypes.c_size_t), ("magic", ctypes.c_uint), ("version", ctypes.c_uint),
                ("blocking", ctypes.c_int), ("cgaClusterSize", ctypes.c_int),
                ("minCTAs", ctypes.c_int), ("maxCTAs", ctypes.c_int),
                ("netName", ctypes.c_char_p), ("splitShare", ctypes.c_int)]


UNSET = -2**31
_CALL = [buffer_t, buffer_t, ctypes.c_size_t, ncclDataType_t]
FUNCTIONS = {
    "ncclGetErrorString": (ctypes.c_char_p, [ncclResult_t]),
    "ncclGetLastError": (ctypes.c_char_p, [ncclComm_t]),
    "ncclGetVersion": (ncclResult_t, [ctypes.POINTER(ctypes.c_int)]),
    "ncclGetUniqueId": (ncclResult_t, [ctypes.POINTER(ncclUniqueId)]),
    "ncclCommInitRank": (ncclResult_t, [ctypes.POINTER(ncclComm_t), ctypes.c_int, ncclUniqueId,
                                        ctypes.c_int]),
    "ncclCommInitRankConfig": (ncclResult_t, [ctypes.POINTER(ncclComm_t), ctypes.c_int,
                                              ncclUniqueId, ctypes.c_int, ctypes.POINTER(Config)]),
    "ncclCommSplit": (ncclResult_t, [ncclComm_t, ctypes.c_int, ctypes.c_int,
                                     ctypes.POINTER(ncclComm_t), ctypes.POINTER(Config)]),
    "ncclCommShrink": (ncclResult_t, [ncclComm_t, ctypes.POINTER(ctypes.c_int), ctypes.c_int,
                                      ctypes.POINTER(ncclComm_t), ctypes.POINTER(Config),
                                      ctypes.c_int]),
    "ncclCommCount": (ncclResult_t, [ncclComm_t, ctypes.POINTER(ctypes.c_int)]),
    "ncclCommUserRank": (ncclResult_t, [ncclComm_t, ctypes.POINTER(ctypes.c_int)]),
    "ncclCommGetAsyncError": (ncclResult_t, [ncclComm_t, ctypes.POINTER(ncclResult_t)]),
    "ncclCommFinalize": (ncclResult_t, [ncclComm_t]),
    "ncclCommDestroy": (ncclResult_t, [ncclComm_t]),
    "ncclCommAbort": (ncclResult_t, [ncclComm_t]),
    "ncclAllReduce": (ncclResult_t, [*_CALL, ncclRedOp_t, ncclComm_t, cudaStream_t]),
    "ncclReduce": (ncclResult_t, [*_CALL, ncclRedOp_t, ctypes.c_int, ncclComm_t, cudaStream_t]),
    "ncclAllGather": (ncclResult_t, [*_CALL, ncclComm_t, cudaStream_t]),
    "ncclReduceScatter": (ncclResult_t, [*_CALL, ncclRedOp_t, ncclComm_t, cudaStream_t]),
    "ncclBroadcast": (ncclResult_t, [*_CALL, ctypes.c_int, ncclComm_t, cudaStream_t]),
    "ncclAlltoAll": (ncclResult_t, [*_CALL, ncclComm_t, cudaStream_t]),
    "ncclGather": (ncclResult_t, [*_CALL, ctypes.c_int, ncclComm_t, cudaStream_t]),
    "ncclScatter": (ncclResult_t, [*_CALL, ctypes.c_int, ncclComm_t, cudaStream_t]),
    "ncclSend": (ncclResult_t, [buffer_t, ctypes.c_size_t, ncclDataType_t, ctypes.c_int, ncclComm_t,
                                cudaStream_t]),
    "ncclRecv": (ncclResult_t, [buffer_t, ctypes.c_size_t, ncclDataType_t, ctypes.c_int, ncclComm_t,
                                cudaStream_t]),
    "ncclGroupStart": (ncclResult_t, []),
    "ncclGroupEnd": (ncclResult_t, []),
}


class Library:
    """The functions as attributes; each call raises if the result is not one of `want`."""

    def __init__(self, path):
        self.library = ctypes.CDLL(path)
        for name, (result, arguments) in FUNCTIONS.items():
            function = getattr(self.library, name)
            function.restype, function.argtypes = result, arguments

    def __call__(self, name, *arguments, want=(SUCCESS,)):
        result = getattr(self.library, name)(*arguments)
        if result not in want:
            text = self.library.ncclGetErrorString(result).decode()
            raise AssertionError(f"{name}: {result} ({text}), not {want}: {self.last_error()}")
        return result

    def last_error(self, comm=None):
        return self.library.ncclGetLastError(comm).decode()


# ---- element types: bytes of whole numbers, and back --------------------------------------------

def small_float(bits, mantissa, bias):
    """{value: code} of the finite values of a float of 8 bits, or of the upper half of an f32."""
    values = {}
    for code in range(1 << bits):
        sign, exponent = code >> (bits - 1), (code >> mantissa) & ((1 << (bits - 1 - mantissa)) - 1)
        fraction = code & ((1 << mantissa) - 1)
        scale = 2.0 ** (max(exponent, 1) - bias - mantissa)
        value = ((fraction | (1 << mantissa)) if exponent else fraction) * scale
        values.setdefault(-value if sign else value, code)
    return values


def by_struct(letter):
    return (struct.calcsize(letter), lambda xs: struct.pack(f"<{len(xs)}{letter}", *xs),
            lambda raw: list(struct.unpack(f"<{len(raw) // struct.calcsize(letter)}{letter}", raw)))


def by_table(mantissa, bias):
    codes = small_float(8, mantissa, bias)
    values = {code: value for value, code in codes.items()}
    return (1, lambda xs: bytes(codes[float(x)] for x in xs), lambda raw: [values[b] for b in raw])


def bf16():
    return (2, lambda xs: b"".join(struct.pack("<f", x)[2:] for x in xs),
            lambda raw: [struct.unpack("<f", b"\0\0" + raw[i:i + 2])[0]
                         for i in range(0, len(raw), 2)])


TYPES = {0: by_struct("b"), 1: by_struct("B"), 2: by_struct("i"), 3: by_struct("I"),
         4: by_struct("q"), 5: by_struct("Q"), 6: by_struct("e"), 7: by_struct("f"),
         8: by_struct("d"), 9: bf16(), 10: by_table(3, 7), 11: by_table(2, 15)}


class Pointer:
    """An address that keeps its memory alive while a call uses it."""

    def __init__(self, memory, address):
        self.memory, self._as_parameter_ = memory, address


class Buffer:
    """Host memory for elements of one type, with a fence at its end."""
    FENCE = b"\xa5" * 16

    def __init__(self, type_, values=None, count=0):
        self.size, self.encode, self.decode = TYPES[type_]
        raw = self.encode(values) if values is not None else b"\x5b" * (count * self.size)
        self.bytes = len(raw)
        self.memory = ctypes.create_string_buffer(raw + self.FENCE, self.bytes + len(self.FENCE))

    def at(self, element=0):
        return Pointer(self.memory, ctypes.addressof(self.memory) + element * self.size)

    def values(self):
        assert self.memory.raw[self.bytes:] == self.FENCE, "written beyond the end"
        return self.decode(self.memory.raw[:self.bytes])


# ---- what every rank does ------------------------------------------------------------------------

class Rank:
    def __init__(self, library, rank, size, folder):
        self.nccl, self.rank, self.size, self.folder = library, rank, size, folder
        self.ids = 0
        self.comm = None

    def fresh_id(self):
        """An id of rank 0's making that all ranks read."""
        self.ids += 1
        path = os.path.join(self.folder, f"id{self.ids}")
        unique = ncclUniqueId()
        if self.rank == 0:
            self.nccl("ncclGetUniqueId", ctypes.byref(unique))
            with open(path + ".new", "wb") as file:
                file.write(bytes(unique))
            os.rename(path + ".new", path)
        else:
            while not os.path.exists(path):
                time.sleep(0.002)
            with open(path, "rb") as file:
                ctypes.memmove(ctypes.byref(unique), file.read(), 128)
        return unique

    def new_comm(self):
        comm = ncclComm_t()
        self.nccl("ncclCommInitRank", ctypes.byref(comm), self.size, self.fresh_id(), self.rank)
        return comm

    def settled(self, comm):
        state = ncclResult_t(IN_PROGRESS)
        while state.value == IN_PROGRESS:
            self.nccl("ncclCommGetAsyncError", comm, ctypes.byref(state))
            time.sleep(0.001)
        return state.value

    def value(self, rank, i):
        """Element i of a rank's input: small enough for every type and product."""
        return 1 + (rank + i) % 2

    def inputs(self, rank, count):
        return [self.value(rank, i) for i in range(count)]


def fold(op, column):
    if op == SUM:
        return sum(column)
    if op == PROD:
        return math.prod(column)
    return {MAX: max, MIN: min}[op](column)


def collectives(me):
    nccl, size, comm = me.nccl, me.size, me.comm
    count = 37
    everybody = [me.inputs(r, size * count) for r in range(size)]
    mine = everybody[me.rank]
    for type_ in TYPES:
        for op in (SUM, PROD, MAX, MIN):
            column = [fold(op, [everybody[r][i] for r in range(size)]) for i in range(size * count)]
            out = Buffer(type_, count=count)
            nccl("ncclAllReduce", Buffer(type_, mine[:count]).at(), out.at(), count, type_, op, comm,
                 None)
            assert out.values() == column[:count], (type_, op)
            place = Buffer(type_, mine)
            nccl("ncclReduceScatter", place.at(), place.at(me.rank * count), count, type_, op, comm,
                 None)
            part = slice(me.rank * count, (me.rank + 1) * count)
            assert place.values()[part] == column[part], (type_, op)
            out = Buffer(type_, count=count)
            root = (op + type_) % size
            nccl("ncclReduce", Buffer(type_, mine[:count]).at(),
                 out.at() if me.rank == root else None, count, type_, op, root, comm, None)
            if me.rank == root:
                assert out.values() == column[:count], (type_, op)
        gathered = Buffer(type_, count=size * count)
        nccl("ncclAllGather", Buffer(type_, mine[:count]).at(), gathered.at(), count, type_, comm,
             None)
        assert gathered.values() == [x for r in range(size) for x in everybody[r][:count]], type_
        root = type_ % size
        out = Buffer(type_, count=count)
        nccl("ncclBroadcast", Buffer(type_, mine[:count]).at() if me.rank == root else None,
             out.at(), count, type_, root, comm, None)
        assert out.values() == everybody[root][:count], type_
        out = Buffer(type_, count=size * count)
        nccl("ncclAlltoAll", Buffer(type_, mine).at(), out.at(), count, type_, comm, None)
        part = slice(me.rank * count, (me.rank + 1) * count)
        assert out.values() == [x for r in range(size) for x in everybody[r][part]], type_
        out = Buffer(type_, count=size * count)
        nccl("ncclGather", Buffer(type_, mine[:count]).at(), out.at(), count, type_, root, comm,
             None)
        if me.rank == root:
            assert out.values() == gathered.values(), type_
        out = Buffer(type_, count=count)
        nccl("ncclScatter", Buffer(type_, mine).at(), out.at(), count, type_, root, comm, None)
        assert out.values() == everybody[root][part], type_


def averages(me):
    """C58: the divisor is the number of ranks; integers cut. C57 is otherwise in NCCL's numerics:
    inputs are multiplied by 1/N first, so large values do not overflow and small ones vanish."""
    for type_, mine, want in [(2, [3 + me.rank, -3 - me.rank], None), (7, [1.5] * 5, [1.5] * 5),
                              (6, [40000.0], [40000.0]), (6, [2.0**-24], [0.0]), (8, [7.0], [7.0])]:
        total = [sum(3 + r for r in range(me.size)), sum(-3 - r for r in range(me.size))]
        want = want or [int(x / me.size) for x in total]
        out = Buffer(type_, count=len(mine))
        me.nccl("ncclAllReduce", Buffer(type_, mine).at(), out.at(), len(mine), type_, AVG, me.comm,
                None)
        assert out.values() == want, (type_, out.values(), want)


def groups_and_messages(me):
    nccl, size = me.nccl, me.size
    second = me.new_comm()
    right, left = (me.rank + 1) % size, (me.rank - 1) % size
    sent, got, summed = Buffer(7, [float(me.rank)] * 9), Buffer(7, count=9), Buffer(7, count=9)
    nccl("ncclGroupStart")
    nccl("ncclSend", sent.at(), 9, 7, right, me.comm, None)
    nccl("ncclRecv", got.at(), 9, 7, left, me.comm, None)
    nccl("ncclGroupStart")
    nccl("ncclAllReduce", sent.at(), summed.at(), 9, 7, SUM, second, None)
    nccl("ncclGroupEnd")
    nccl("ncclGroupEnd")
    assert got.values() == [float(left)] * 9
    assert summed.values() == [float(sum(range(size)))] * 9
    nccl("ncclCommFinalize", second)
    nccl("ncclCommDestroy", second)


def splits(me):
    nccl, part, nobody = me.nccl, ncclComm_t(), ncclComm_t(1)
    nccl("ncclCommSplit", me.comm, me.rank % 2, -me.rank, ctypes.byref(part), None)
    rank, size = ctypes.c_int(), ctypes.c_int()
    nccl("ncclCommUserRank", part, ctypes.byref(rank))
    nccl("ncclCommCount", part, ctypes.byref(size))
    mates = [r for r in range(me.size) if r % 2 == me.rank % 2]
    assert size.value == len(mates) and rank.value == len(mates) - 1 - mates.index(me.rank)
    out = Buffer(4, count=1)
    nccl("ncclAllReduce", Buffer(4, [me.rank]).at(), out.at(), 1, 4, SUM, part, None)
    assert out.values() == [sum(mates)]
    nccl("ncclCommDestroy", part)
    color = 0 if me.rank == 0 else -1
    nccl("ncclCommSplit", me.comm, color, 0, ctypes.byref(nobody), None)
    assert (nobody.value is None) == (me.rank != 0)
    if nobody.value is not None:
        nccl("ncclCommDestroy", nobody)


def wrong_calls(me):
    nccl, out = me.nccl, Buffer(7, count=4)
    nccl("ncclBroadcast", out.at(), out.at(), 4, 7, me.size, me.comm, None, want=(INVALID_ARGUMENT,))
    assert f"root {me.size}" in nccl.last_error(), nccl.last_error()
    nccl("ncclAllReduce", None, out.at(), 4, 7, SUM, me.comm, None, want=(INVALID_ARGUMENT,))
    assert "null" in nccl.last_error()
    nccl("ncclAllReduce", out.at(), out.at(), 4, 7, 5, me.comm, None, want=(INVALID_ARGUMENT,))
    nccl("ncclAllReduce", out.at(), out.at(), 4, 99, SUM, me.comm, None, want=(INVALID_ARGUMENT,))
    # The ranks call different things: all of them hear of it, in the words of both sides.
    bad = me.new_comm()
    count = 4 if me.rank == 0 else 3
    nccl("ncclAllReduce", out.at(), out.at(), count, 7, SUM, bad, None, want=(INVALID_USAGE,))
    text = nccl.last_error(bad)
    assert "of 4 elements" in text and "of 3 elements" in text, text
    nccl("ncclCommAbort", bad)
    good = Buffer(7, count=1)  # others are not touched by it
    nccl("ncclAllReduce", Buffer(7, [2.0]).at(), good.at(), 1, 7, SUM, me.comm, None)
    assert good.values() == [2.0 * me.size]


def non_blocking(me):
    nccl, comm, part = me.nccl, ncclComm_t(), ncclComm_t()
    config = Config(ctypes.sizeof(Config), 0xcafebeef, 21803, 0, UNSET, UNSET, UNSET, None, UNSET)
    nccl("ncclCommInitRankConfig", ctypes.byref(comm), me.size, me.fresh_id(), me.rank,
         ctypes.byref(config), want=(SUCCESS, IN_PROGRESS))
    assert comm.value is not None and me.settled(comm) == SUCCESS
    out = Buffer(7, count=1000)
    source = Buffer(7, [1.0] * 1000)  # must live until it is over
    nccl("ncclAllReduce", source.at(), out.at(), 1000, 7, SUM, comm, None,
         want=(SUCCESS, IN_PROGRESS))
    assert me.settled(comm) == SUCCESS and out.values() == [float(me.size)] * 1000
    nccl("ncclCommSplit", comm, 0, me.rank, ctypes.byref(part), None, want=(SUCCESS, IN_PROGRESS))
    assert me.settled(comm) == SUCCESS and me.settled(part) == SUCCESS
    for done in (part, comm):
        nccl("ncclCommFinalize", done, want=(SUCCESS, IN_PROGRESS))
        assert me.settled(done) == SUCCESS
        nccl("ncclCommDestroy", done)


def abort_while_waiting(me):
    """One thread hangs in a call that nobody else makes; a watchdog's abort ends it."""
    comm, out, results = me.new_comm(), Buffer(7, count=1), []
    if me.rank == 0:
        call = threading.Thread(target=lambda: results.append(me.nccl.library.ncclAllReduce(
            out.at(), out.at(), 1, 7, SUM, comm, None)))
        call.start()
        time.sleep(0.1)
        assert not results
        me.nccl("ncclCommAbort", comm)
        call.join(20)
        assert results == [REMOTE_ERROR], results
    else:
        state = ncclResult_t()
        until = time.monotonic() + 20
        while state.value == SUCCESS and time.monotonic() < until:
            me.nccl("ncclCommGetAsyncError", comm, ctypes.byref(state))
            time.sleep(0.005)
        assert state.value == REMOTE_ERROR, state.value
        assert "rank 0" in me.nccl.last_error(comm), me.nccl.last_error(comm)
        me.nccl("ncclCommAbort", comm)


def death_and_shrink(me):
    """The last rank dies; the others hear of it and go on without it."""
    comm, smaller, out = me.new_comm(), ncclComm_t(), Buffer(7, count=1)
    dead = me.size - 1
    me.nccl("ncclAllReduce", Buffer(7, [1.0]).at(), out.at(), 1, 7, SUM, comm, None)
    if me.rank == dead:
        os._exit(0)
    me.nccl("ncclAllReduce", out.at(), out.at(), 1, 7, SUM, comm, None, want=(REMOTE_ERROR,))
    assert f"rank {dead}" in me.nccl.last_error(comm), me.nccl.last_error(comm)
    gone = (ctypes.c_int * 1)(dead)
    me.nccl("ncclCommShrink", comm, gone, 1, ctypes.byref(smaller), None, 1)
    me.nccl("ncclCommAbort", comm)
    me.nccl("ncclAllReduce", Buffer(7, [3.0]).at(), out.at(), 1, 7, SUM, smaller, None)
    assert out.values() == [3.0 * dead], out.values()
    me.nccl("ncclCommDestroy", smaller)


CASES = [collectives, averages, groups_and_messages, splits, wrong_calls, non_blocking,
         abort_while_waiting, death_and_shrink]


def as_rank(path, rank, size, folder):
    me = Rank(Library(path), rank, size, folder)
    version = ctypes.c_int()
    me.nccl("ncclGetVersion", ctypes.byref(version))
    assert len(str(version.value)) == 5, version.value  # vLLM cuts the digits apart
    me.comm = me.new_comm()
    for case in CASES:
        if case is death_and_shrink:  # the last, and not with the communicator of all
            me.nccl("ncclCommDestroy", me.comm)
        try:
            case(me)
        except AssertionError as error:
            print(f"rank {rank} of {size}, {case.__name__}: {error}", file=sys.stderr, flush=True)
            raise


def main():
    path = sys.argv[1]
    if len(sys.argv) > 2:
        return as_rank(path, int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
    failed = False
    for size in (2, 4):
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, __file__, path]
            ranks = [subprocess.Popen([*command, str(r), str(size), folder]) for r in range(size)]
            try:
                until = time.monotonic() + 50
                failed |= any([rank.wait(max(0.1, until - time.monotonic())) for rank in ranks])
            except subprocess.TimeoutExpired:
                print(f"{size} ranks: no end in time", file=sys.stderr)
                failed = True
            finally:
                for rank in ranks:
                    rank.kill()
                    rank.wait()
    return failed


if __name__ == "__main__":
    sys.exit(main())
