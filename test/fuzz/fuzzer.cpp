// One target as a libFuzzer program.
#include "test/fuzz/targets.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  ringfold::test::fuzz::RINGFOLD_FUZZ_TARGET({data, size});
  return 0;
}
