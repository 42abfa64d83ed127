// Bucket hooks that send fewer bytes than the gradients have.
//
//   SyncOptions options;
//   options.hook = *ringfold::quantise_hook(ringfold::DType::i8);
//
// Each rounds, and each remembers what rounding has taken away and adds it to the next gradient of
// that element (error feedback), so that nothing is lost in the long run, only late. All ranks get
// the same bits. Bytes sent by each of N ranks, for D bytes of f32, where the plain ring sends
// 2(N-1)/N * D:
//
//   cast_hook(f16, bf16)           (N-1)/N * D         one all_reduce in that type
//   quantise_hook(i8, f8e4m3)      (N-1)/N * D * 0.508 every rank gets one part of all gradients
//                                                      (all_to_all), adds it up in f32 and hands
//                                                      the sum round (all_gather); 8 bits an
//                                                      element, an f32 scale for every 256
//   sparsify_hook(share)           (N-1) * share * 2 D everybody's largest elements, with their
//                                                      places (all_gather): less only while share
//                                                      is below 1/N
//
// A hook remembers the gradients of one rank: make one for each synchroniser. The remainders cost
// as much memory as the gradients in f32, and are dropped when buckets are laid out anew. Gradients
// that are NaN or infinite stay so in the average (quantised: all elements of that block become
// NaN), and are not remembered. Buckets of 16-bit types are sent as they are by cast_hook. f64 is
// rounded to f32 by all of them.
// Errors: invalid_argument for a type or share that the hook does not have.
#pragma once

#include "ringfold/gradient_sync.h"

namespace ringfold {

// To f16 or bf16. What is too large for f16 is sent as the largest finite number and the rest
// later.
[[nodiscard]] Result<BucketHook> cast_hook(DType type);

// To i8 or f8e4m3, with one scale for every 256 elements: their largest magnitude.
[[nodiscard]] Result<BucketHook> quantise_hook(DType type);

// Sends the `share` of the elements that is largest in magnitude, at least one of each bucket;
// 0 < share <= 1.
[[nodiscard]] Result<BucketHook> sparsify_hook(double share);

}  // namespace ringfold
