"""This package is the hybrid backend: two backends (sides) that share the work on one model."""
