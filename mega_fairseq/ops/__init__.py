"""Functions on tensors: fast forms, with naive forms to test them against. They import only torch."""
