"""Tests of the kernels: bits, values and refusals."""
