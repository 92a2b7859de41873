"""Tests of the Triton kernels in Triton's interpreter: `test_triton.py` runs them in a process of their own."""
