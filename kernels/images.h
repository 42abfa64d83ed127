// The CUDA kernels as fat binaries, embedded by the build; only where it has nvcc.
#pragma once

// NOLINTBEGIN(readability-identifier-naming): symbols of C
extern "C" {
extern const unsigned long long ringfold_worker_image[];  // ringfold_worker_<type>(Lane*)
extern const unsigned long long ringfold_reduce_image[];  // ringfold_reduce_<type>(Command)
}
// NOLINTEND(readability-identifier-naming)
