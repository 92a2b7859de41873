"""What a module of Triton kernels would contain, in plain torch: for tests of `Forms`, which import it late."""


def scaled(x, factor=1.0):
    return x * factor + 20.0
