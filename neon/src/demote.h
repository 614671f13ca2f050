/* The function of demote.c that layers.c puts into its table. */
#ifndef RVM_DEMOTE_H
#define RVM_DEMOTE_H

#include "rvm.h"

#define DEMOTE_JOIN_(name) rvm_demote_##name
#define DEMOTE_JOIN(name) DEMOTE_JOIN_(name)
#define DEMOTE DEMOTE_JOIN(RVM_IMPL)

int DEMOTE(rvm_tier from, const uint8_t *src, rvm_tier to, uint8_t *dst, size_t n, size_t head_dim);

#endif
