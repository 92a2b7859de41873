"""Comparisons with other implementations. Each checks correctness before it measures time."""
