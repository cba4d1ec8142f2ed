/* What the library offers, and the only text that cffi reads: plain C, no preprocessor beyond #define of numbers.

   Launchers return 0, or a code and have done nothing: 1 a dtype that does not go here, 2 an impossible size, 3 rows
   too long for a block's threads, 4 no memory (of the host), 90 a fault in the emulator, 100 + n the device runtime's
   error n. They only start work: `stream` is a stream of the device, or on the CPU the number of threads to use.
   Matrices are dense, rows of `columns` elements. `x` and results have storage type `dtype`; `float` is fp32 whatever
   the dtype. A pointer that may be null says so. Nothing allocates device memory: a `workspace` needs no initial value.
   */

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

/* Activations of x + bias, bias may be null: GELU by erf (tanh = 0) or tanh (1). The backward pass gives dx, and where
   bias is not null sums = [columns], its gradient, by workspace = [parts][columns]. */
int pipert_gelu_forward(void *y, const void *x, const float *bias, int64_t rows, int64_t columns, int tanh, int dtype,
                        void *stream);
int pipert_gelu_backward(void *dx, float *sums, float *workspace, int64_t parts, const void *dy, const void *x,
                         const float *bias, int64_t rows, int64_t columns, int tanh, int dtype, void *stream);

/* y = silu(gate) * up, [rows][columns]; x and dx = [rows][2 * columns], every row its gate and then its up. */
int pipert_swiglu_forward(void *y, const void *x, int64_t rows, int64_t columns, int dtype, void *stream);
int pipert_swiglu_backward(void *dx, const void *dy, const void *x, int64_t rows, int64_t columns, int dtype,
                           void *stream);

/* One step of AdamW over flat buffers of n elements. decay = lr * weight decay; step_size = lr / (1 - beta1^t);
   root = sqrt(1 - beta2^t). param (may be null) receives the new master in param_dtype. The gradient is multiplied by
   scale[0] (null: 1). Nothing changes if skip[0] is not 0 (null: 0). */
int pipert_adamw(void *param, float *master, float *average, float *square, const void *grad, int64_t n, double beta1,
                 double beta2, double eps, double decay, double step_size, double root, const float *scale,
                 const float *skip, int param_dtype, int grad_dtype, void *stream);

/* result[0] = sum of the squares of many tensors of one dtype. table = [chunks][2] of addresses and numbers of elements
   (at most a few ten thousand, for the work is shared out by chunk), workspace = [chunks]. In double: deterministic. */
int pipert_squared_norm(double *result, double *workspace, const int64_t *table, int64_t chunks, int dtype,
                        void *stream);

/* out = in * scale[0] * factor in out_dtype, scale may be null. overflow[0] = 1 if a result is not finite; may be null,
   and is not set to 0 here. out may be in, if the dtypes are the same. */
int pipert_scale_cast(void *out, const void *in, int64_t n, const float *scale, double factor, float *overflow,
                      int in_dtype, int out_dtype, void *stream);

/* y = residual + dropout(x + bias); bias and residual may be null. Row r belongs to sample r / rows_per_sample; element e
   of a sample (counted over its rows from `offset`) is kept if word e % 4 of Philox4x32-10(key of the sample, counter
   e / 4) is at least `threshold`, then multiplied by `factor`. The mask is never stored: the backward pass without
   bias is the forward pass of dy without bias and residual; with bias it also sums columns. */
int pipert_dropout_forward(void *y, const void *x, const float *bias, const void *residual, const int64_t *keys,
                           int64_t rows, int64_t columns, int64_t rows_per_sample, int64_t offset, int64_t threshold,
                           double factor, int dtype, void *stream);
int pipert_dropout_backward(void *dx, float *sums, float *workspace, int64_t parts, const void *dy,
                            const int64_t *keys, int64_t rows, int64_t columns, int64_t rows_per_sample,
                            int64_t offset, int64_t threshold, double factor, int dtype, void *stream);

/* Rotary positions: pairs (x[i], x[half + i]) of rows of `width` elements turn by the angle whose cosine and sine are in
   tables [positions][half]; the rest of the row is copied. Rows are x[a * xa + b * xb + c * xc], a < na, b < nb, c < nc,
   likewise y, and their position is a * pa + b * pb + c * pc. inverse = 1 turns back. y may be x. */
int pipert_rotary(void *y, const void *x, const float *cosines, const float *sines, int64_t na, int64_t nb, int64_t nc,
                  int64_t xa, int64_t xb, int64_t xc, int64_t ya, int64_t yb, int64_t yc, int64_t pa, int64_t pb,
                  int64_t pc, int64_t half, int64_t width, int inverse, int dtype, void *stream);

/* y = softmax(scale * x) over rows of [batch][heads][queries][columns]. mask (may be null) is bool with these strides
   and 1 along columns: 0 takes an element out. causal = 1: query q sees columns up to q + columns - queries. A row
   without any element is 0. Backward: dx = scale * y * (dy - sum(dy * y)). */
int pipert_softmax_forward(void *y, const void *x, const void *mask, int64_t batch, int64_t heads, int64_t queries,
                           int64_t columns, int64_t mask_batch, int64_t mask_head, int64_t mask_query, double scale,
                           int causal, int dtype, void *stream);
int pipert_softmax_backward(void *dx, const void *dy, const void *y, int64_t rows, int64_t columns, double scale,
                            int dtype, void *stream);

/* Cross-entropy over a vocabulary that may be shared out: this shard has columns [first, first + columns), rows of the
   logits are `stride` elements apart. statistics = [4][rows]: maximum, sum of exp(x - maximum), logit of the target (0
   where another shard has it), sum of (x - maximum). */
int pipert_cross_entropy_statistics(float *statistics, const void *logits, const int64_t *targets, int64_t rows,
                                    int64_t columns, int64_t stride, int64_t first, int dtype, void *stream);

/* dx = (exp(x - maximum[row]) * inverse_sum[row] - hit * [column is the target] - even) * gradient[row], in rows
   `stride` apart; 0 where gradient[row] is 0 and in columns from `columns` to `stride`. dx may be the logits. */
int pipert_cross_entropy_gradient(void *dx, const void *logits, const int64_t *targets, const float *maximum,
                                  const float *inverse_sum, const float *gradient, int64_t rows, int64_t columns,
                                  int64_t stride, int64_t first, double hit, double even, int dtype, void *stream);
