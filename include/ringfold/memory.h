// Memory for buffers that the other ranks of the host can reach: large collectives then read and
// write it where it lies, and nothing is copied into or out of the library.
//
//   auto memory = ringfold::allocate_memory(bytes);
//   comm.all_reduce(*memory, *memory, n, DType::f32, Op::sum).wait();
//
// It is a hint: any part of it may be a buffer of any call, as any other memory may; every result
// is the same. The other ranks get to know the memory while the first operations on it are under
// way, or from Communicator::register_memory(), and use it once all of them have mapped it. An
// operation goes without copies when every rank gives such memory for all its buffers
// (reduce_scatter and all_gather: for the input; broadcast: on the root); otherwise all go the
// ordinary way. Report::transport says "direct" for it.
//
// Thread-safety: any thread. Ownership: the process that allocated it; communicators may end before
// or after it. Nothing is left behind when a process is killed.
// A forked child shares the memory with its parent, as it does shared memory of any kind.
#pragma once

#include <cstddef>

#include "ringfold/status.h"

namespace ringfold {

// Zeroed, all of it reserved at once, beginning at a page. system: it could not be had.
// invalid_argument: 0 bytes.
[[nodiscard]] Result<void*> allocate_memory(size_t bytes);

// `memory` is what allocate_memory() returned; null is ignored. invalid_argument: it is not, or it
// is a buffer of an operation that is not done; then nothing happens. (Operations of at most 4 KiB
// are not looked at: to free their buffers too early is an error as with any memory.)
[[nodiscard]] Status free_memory(void* memory);

}  // namespace ringfold
