/* This header converts floats to their bits and back, and IEEE halves to floats, for the other source files. */
#ifndef RVM_BITS_H
#define RVM_BITS_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

static inline size_t min_size(size_t a, size_t b) { return a < b ? a : b; }

/* Return the number of words of 4 bytes of a LoRA's row of n weights with 32 bits, or packed with 4 bits
 * (rvm_layers.h). */
static inline size_t lora_words(size_t n, int bits) { return bits == 4 ? (n + 31) / 32 * 6 : n; }

static inline uint32_t bits_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return bits;
}

static inline float float_of(uint32_t bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

/* Convert an IEEE half to a float exactly. The result for a subnormal half is exact even if the processor is set to
 * treat subnormal floats as zero. */
static inline float half_to_float(uint16_t h) {
    const uint32_t sign = (uint32_t)(h & 0x8000u) << 16, rest = h & 0x7fffu;
    if (rest >= 0x7c00) return float_of(sign | 0x7f800000u | (rest & 0x3ff) << 13);
    if (rest >= 0x0400) return float_of(sign | ((rest << 13) + 0x38000000u));
    const float tiny = (float)rest * 5.9604644775390625e-8f; /* rest * 2^-24 */
    return float_of(sign | bits_of(tiny));
}

#endif
