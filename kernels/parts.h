// The SIMD kernels behind reduce_host and fold_host, by family of types: one source file each, so
// that they compile side by side. Every entry returns the function of the target in force. The
// functions they return ignore ReduceCall::mirror. For reduce_host.cpp only.
#pragma once

#include "kernels/reduce.h"

namespace ringfold::parts {

using Reduce = void (*)(const ReduceCall& call);
// out[i] = a[i] * scale_a, rounded; `b` equals `a`. Never asked for a factor of 1.
using Scale = Reduce;

// Folds and sees to mirror and stream as well.
using Fold = void (*)(const FoldCall& call);

Reduce reduce_integers();
Reduce reduce_wide_floats();   // f32, f64
Reduce reduce_small_floats();  // f16, bf16, fp8
Scale scale_wide_floats();
Scale scale_small_floats();
Fold fold_integers();
Fold fold_wide_floats();
Fold fold_small_floats();

}  // namespace ringfold::parts
