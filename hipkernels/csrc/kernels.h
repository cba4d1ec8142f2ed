/* What the library offers, and the only text that cffi reads: plain C, no preprocessor beyond #define of numbers.

   Launchers return 0, or a code and have done nothing: 1 a dtype that does not go here, 2 an impossible size, 3 rows
   too long for a block's threads, 90 a fault in the emulator, 100 + n the device runtime's error n. They only start
   work: `stream` is a stream of the device, or on the CPU the number of threads to use. Matrices are dense, rows of
   `columns` elements. `x` and results have storage type `dtype`; `float` is fp32 whatever the dtype. A pointer that may
   be null says so. Nothing allocates: a `workspace` needs no initial value. */

#define PIPERT_FP32 0
#define PIPERT_BF16 1
#define PIPERT_FP16 2
#define PIPERT_KERNELS_ABI 1

/* PIPERT_KERNELS_ABI of the library. */
int pipert_abi(void);

/* Columns of the longest rows whose columns can be summed (threads own columns then); 0: no limit. */
int64_t pipert_widest(void);

/* Emulated blocks only (elsewhere they return 2 and ""): lanes a wave, threads a block or 0 for the launcher's choice,
   order of the threads (0 lowest first, 1 highest first, 2 random by seed); and where the last fault was. */
int pipert_emulate(int wave, int threads, int order, int64_t seed);
const char *pipert_fault(void);

/* LayerNorm (centred = 1) or RMSNorm (0) of rows: y = (h - mean) * rstd * weight + bias, h = x + residual rounded to the
   dtype, or x where residual (and then `h`) is null. Statistics are kept for the backward pass. bias may be null. */
int pipert_norm_forward(void *y, void *h, float *mean, float *rstd, const void *x, const void *residual,
                        const float *weight, const float *bias, int64_t rows, int64_t columns, double eps, int centred,
                        int dtype, void *stream);

/* dx (for x and for the residual) from dy and from dh, the gradient that reaches h another way (may be null).
   sums = [2][columns]: of weight and bias. workspace = [parts][2][columns]. */
int pipert_norm_backward(void *dx, float *sums, float *workspace, int64_t parts, const void *dy, const void *dh,
                         const void *h, const float *weight, const float *mean, const float *rstd, int64_t rows,
                         int64_t columns, int centred, int dtype, void *stream);
