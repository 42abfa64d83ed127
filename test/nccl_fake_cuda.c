/* Stands for a CUDA driver that is too old for this library, where a test needs one: it knows a
 * single piece of device memory, and one context, of device 3. */
#include <stddef.h>

static unsigned char device_memory[64];

void* fake_device_memory(void) {
  return device_memory;
}

int cuInit(unsigned flags) {
  (void)flags;
  return 0;
}

int cuDriverGetVersion(int* version) {
  *version = 11040;
  return 0;
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

int cuCtxPushCurrent_v2(void* context) {
  (void)context;
  return 0;
}

int cuCtxPopCurrent_v2(void** context) {
  *context = device_memory;
  return 0;
}

int cuCtxGetDevice(int* device) {
  *device = 3;
  return 0;
}

int cuDeviceGetCount(int* devices) {
  *devices = 4;
  return 0;
}

int cuDevicePrimaryCtxRetain(void** context, int device) {
  (void)device;
  *context = device_memory;
  return 0;
}

int cuMemAlloc_v2(unsigned long long* memory, size_t bytes) {
  (void)memory, (void)bytes;
  return 2; /* out of memory */
}

int cuMemFree_v2(unsigned long long memory) {
  (void)memory;
  return 1;
}
