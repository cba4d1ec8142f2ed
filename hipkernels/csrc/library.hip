// What the library says about itself, and how tests steer the emulator.
#include "port.h"

int pipert_abi(void) { return PIPERT_KERNELS_ABI; }
int64_t pipert_widest(void) { return PORT_ONE_THREAD ? 0 : PORT_OWNERS * PORT_VALUES; }

#if defined(PORT_EMULATED)
int pipert_emulate(int wave, int threads, int order, int64_t seed) {
  const bool sizes = (wave == 32 || wave == 64) && threads % 64 == 0 && threads >= 0 && threads <= 256;
  if (!sizes || order < PORT_LOWEST_FIRST || order > PORT_RANDOM) return PORT_BAD_SIZE;
  port_emulator.wave = wave;
  port_emulator.threads = threads;
  port_emulator.order = order;
  port_emulator.seed = (uint64_t)seed;
  return 0;
}
const char *pipert_fault(void) { return port_emulator.fault; }
#else
int pipert_emulate(int, int, int, int64_t) { return PORT_BAD_SIZE; }
const char *pipert_fault(void) { return ""; }
#endif
