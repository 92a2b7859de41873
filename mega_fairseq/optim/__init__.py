"""Optimizers; importing this package registers them with fairseq."""

from mega_fairseq.optim.mega_adam import MegaAdam, MegaAdamConfig
