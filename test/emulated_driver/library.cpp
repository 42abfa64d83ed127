// The emulated driver as a library by the name of the real one, for programs that look for that:
// they find it by LD_LIBRARY_PATH, or because it was opened before. A process has one device, for
// ever, with room for the workers of several ranks; RINGFOLD_TEST_DRIVER_SEED is its seed.
#include <cstdlib>
#include <cstring>

#include "test/cuda_test_driver.h"
#include "test/emulated_driver/emulated_driver.h"

namespace ringfold::test {
namespace {

EmulatedOptions options() {
  EmulatedOptions options;
  if (const char* seed = std::getenv("RINGFOLD_TEST_DRIVER_SEED"); seed != nullptr)
    options.seed = std::strtoull(seed, nullptr, 10);
  options.hardware_queues = 8;
  options.resident_blocks = 64;
  const char* const blocking = std::getenv("CUDA_LAUNCH_BLOCKING");
  options.launch_blocking = blocking != nullptr && std::strcmp(blocking, "1") == 0;
  return options;
}

void* find(const char* name) {
  // Never destroyed: the device lives as long as the process.
  [[maybe_unused]] static const auto& driver = *new EmulatedDriver(options());
  void* const function = emulated_function(name);
  if (function != nullptr) return function;
  std::fprintf(stderr, "emulated CUDA driver: no %s\n", name);
  std::abort();
}

}  // namespace
}  // namespace ringfold::test

// An exported function only hands its arguments on, as many as any has: they are all words, and by
// the calling convention it does no harm to hand on more than were given.
#define RINGFOLD_STRING(name) #name
#define RINGFOLD_EXPORT(name)                                                                  \
  extern "C" __attribute__((visibility("default"))) long exported_##name(                      \
      long a, long b, long c, long d, long e, long f, long g, long h, long i, long j,          \
      long k) __asm__(RINGFOLD_STRING(name));                                                  \
  long exported_##name(long a, long b, long c, long d, long e, long f, long g, long h, long i, \
                       long j, long k) {                                                       \
    using Any = long (*)(long, long, long, long, long, long, long, long, long, long, long);    \
    static const auto kFunction =                                                              \
        reinterpret_cast<Any>(ringfold::test::find(RINGFOLD_STRING(name)));                    \
    return kFunction(a, b, c, d, e, f, g, h, i, j, k);                                         \
  }
RINGFOLD_DRIVER_FUNCTIONS(RINGFOLD_EXPORT)
RINGFOLD_TEST_DRIVER_FUNCTIONS(RINGFOLD_EXPORT)
