"""Slow twins, other programs as judges, and calls into the C library that only the tests need."""
