/* Stands for the CUDA driver where a test needs one that knows a single piece of device memory. */
#include <stddef.h>

static unsigned char device_memory[64];

void* fake_device_memory(void) {
  return device_memory;
}

int cuPointerGetAttribute(void* out, int attribute, unsigned long long pointer) {
  const unsigned long long begin = (unsigned long long)(size_t)device_memory;
  if (pointer < begin || pointer >= begin + sizeof device_memory) return 1; /* plain host memory */
  *(unsigned*)out = attribute == 2 ? 2 : 0; /* device memory, not managed */
  return 0;
}

int cuCtxGetCurrent(void** context) {
  *context = device_memory;
  return 0;
}

int cuCtxGetDevice(int* device) {
  *device = 3;
  return 0;
}
