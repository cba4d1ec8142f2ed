// AMD and NVIDIA. See port.h.
#pragma once

#if defined(__CUDACC__)
#include <cuda_runtime.h>
typedef cudaStream_t port_stream_t;
#define PORT_LAST_ERROR() ((int)cudaGetLastError())
#define PORT_WAVE 32
#else
#include <hip/hip_runtime.h>
typedef hipStream_t port_stream_t;
#define PORT_LAST_ERROR() ((int)hipGetLastError())
#if defined(__GFX10__) || defined(__GFX11__) || defined(__GFX12__)
#define PORT_WAVE 32
#else
#define PORT_WAVE 64
#endif
#endif

#define PORT_ONE_THREAD 0
#define PORT_BOTH static inline __host__ __device__
#define PORT_DEVICE static __device__ __forceinline__
#define PORT_METHOD __device__ __forceinline__
#define PORT_KERNEL(name, ...) static __global__ void __launch_bounds__(1024) name(__VA_ARGS__)
// Kernels whose threads own columns hold them in registers: with 1024 threads there would be too few for odd widths.
#define PORT_OWNER_KERNEL(name, ...) static __global__ void __launch_bounds__(PORT_OWNERS) name(__VA_ARGS__)
#define PORT_BLOCK ((int64_t)blockIdx.x)
#define PORT_THREAD ((int64_t)threadIdx.x)
#define PORT_THREADS ((int64_t)blockDim.x)
#define PORT_SHARED(type, name, count) __shared__ type name[count]
#define PORT_BARRIER() __syncthreads()
#define PORT_ALIGNED(p, alignment) ((void)0)
#define PORT_UNROLL _Pragma("unroll")
#define PORT_PREFETCH(p) ((void)(p))

// Blocks of a grid over independent rows or elements. More than enough for every device; the scheduler does the rest.
#define PORT_GRID 65536
// The least elements that are worth a block of their own, a multiple of 16.
#define PORT_LEAST_CHUNK 8192

PORT_DEVICE float port_shuffle_xor(float value, int mask) {
#if defined(__CUDACC__)
  return __shfl_xor_sync(0xffffffffu, value, mask);
#else
  return __shfl_xor(value, mask, PORT_WAVE);
#endif
}

PORT_DEVICE double port_shuffle_xor(double value, int mask) {
#if defined(__CUDACC__)
  return __shfl_xor_sync(0xffffffffu, value, mask);
#else
  return __shfl_xor(value, mask, PORT_WAVE);
#endif
}

PORT_DEVICE void port_raise(float *flag) { *(volatile float *)flag = 1.0f; }

static inline int port_block_size(int threads) { return threads; }

template <class... P, class... A>
static int port_launch(void *stream, int64_t blocks, int threads, void (*kernel)(P...), A... arguments) {
  if (blocks <= 0) return 0;
  kernel<<<dim3((unsigned)blocks), dim3((unsigned)threads), 0, (port_stream_t)stream>>>((P)arguments...);
  int code = PORT_LAST_ERROR();
  return code ? 100 + code : 0;
}
