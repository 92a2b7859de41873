"""Functions on tensors: fast implementations, and naive ones to test them against. They import only torch."""
