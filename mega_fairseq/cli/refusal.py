"""How a command says no."""


class Refusal(Exception):
    """One sentence for the user: what is wrong, and what to do about it."""
