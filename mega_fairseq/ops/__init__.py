"""Functions on tensors, each fast form beside its naive one. They import torch and nothing else."""
