/* draw.c defines the function `draw` for each instruction set. kernels.c puts the function into its table rvm_kernels.
   */
#ifndef RVM_DRAW_H
#define RVM_DRAW_H

#include "rvm.h"

#define DRAW_JOIN_(a, b) a##b
#define DRAW_JOIN(a, b) DRAW_JOIN_(a, b)
#define DRAW DRAW_JOIN(rvm_draw_, RVM_IMPL)

int DRAW(const float *logits, size_t vocab, const rvm_drawing *how, uint64_t *scratch, int32_t *token);

#endif
