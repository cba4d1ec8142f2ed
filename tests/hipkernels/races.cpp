// Runs the kernels in emulated blocks, under ThreadSanitizer: waves of 64 and 32. Kernels that are
// not linked in are left out. Exit code 3: a launcher returned a code.
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#include <initializer_list>

extern "C" {
#include "kernels.h"
#pragma weak pipert_gelu_backward
#pragma weak pipert_squared_norm
#pragma weak pipert_dropout_backward
#pragma weak pipert_softmax_forward
#pragma weak pipert_softmax_backward
#pragma weak pipert_cross_entropy_statistics
#pragma weak pipert_cross_entropy_gradient
#pragma weak pipert_scale_cast
}

static const int64_t ROWS = 5, COLUMNS = 200, N = ROWS * COLUMNS;

static float *numbers() {
  float *memory = (float *)aligned_alloc(64, (N + 63) / 64 * 64 * sizeof(float));
  for (int64_t i = 0; i < N; ++i) memory[i] = (float)((i * 7919) % 2003) / 1000.0f - 1.0f;
  return memory;
}

static void check(const char *what, int code) {
  if (code == 0) return;
  fprintf(stderr, "%s returned %d: %s\n", what, code, pipert_fault());
  exit(3);
}

static void run() {
  float *x = numbers(), *y = numbers(), *h = numbers(), *dy = numbers(), *workspace = numbers(), *sums = numbers();
  float mean[ROWS], rstd[ROWS], statistics[4 * ROWS], flag = 0.0f;
  double norm, chunks[ROWS];
  int64_t targets[ROWS], keys[ROWS], table[2 * ROWS];
  for (int64_t r = 0; r < ROWS; ++r) {
    targets[r] = r;
    keys[r] = r;
    table[2 * r] = (int64_t)(uintptr_t)(x + r * COLUMNS);
    table[2 * r + 1] = COLUMNS;
  }
  check("norm_forward",
        pipert_norm_forward(y, h, mean, rstd, x, dy, x, x, ROWS, COLUMNS, 1e-5, 1, PIPERT_FP32, nullptr));
  check("norm_backward",
        pipert_norm_backward(y, sums, workspace, 3, dy, x, h, x, mean, rstd, ROWS, COLUMNS, 1, PIPERT_FP32, nullptr));
  if (pipert_gelu_backward)
    check("gelu_backward",
          pipert_gelu_backward(y, sums, workspace, 3, dy, x, x, ROWS, COLUMNS, 1, PIPERT_FP32, nullptr));
  if (pipert_dropout_backward)
    check("dropout_backward", pipert_dropout_backward(y, sums, workspace, 3, dy, keys, ROWS, COLUMNS, 1, 0, 1 << 30, 1.3,
                                                      PIPERT_FP32, nullptr));
  if (pipert_squared_norm) check("squared_norm", pipert_squared_norm(&norm, chunks, table, ROWS, PIPERT_FP32, nullptr));
  if (pipert_scale_cast)
    check("scale_cast", pipert_scale_cast(y, x, N, nullptr, 1e38, &flag, PIPERT_FP32, PIPERT_FP16, nullptr));
  if (pipert_softmax_forward) {
    check("softmax_forward",
          pipert_softmax_forward(y, x, nullptr, 1, 1, ROWS, COLUMNS, 0, 0, 0, 0.5, 1, PIPERT_FP32, nullptr));
    check("softmax_backward", pipert_softmax_backward(h, dy, y, ROWS, COLUMNS, 0.5, PIPERT_FP32, nullptr));
  }
  if (pipert_cross_entropy_statistics) {
    check("cross_entropy_statistics",
          pipert_cross_entropy_statistics(statistics, x, targets, ROWS, COLUMNS, COLUMNS, 0, PIPERT_FP32, nullptr));
    check("cross_entropy_gradient",
          pipert_cross_entropy_gradient(y, y, targets, statistics, statistics + ROWS, statistics + ROWS, ROWS, COLUMNS,
                                        COLUMNS, 0, 1.0, 0.0, PIPERT_FP32, nullptr));
  }
  for (float *memory : {x, y, h, dy, workspace, sums}) free(memory);
}

int main() {
  for (const int wave : {64, 32})
    for (int order = 0; order < 2; ++order) {
      check("emulate", pipert_emulate(wave, 128, order, 1));
      run();
    }
  return 0;
}
