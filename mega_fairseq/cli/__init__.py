"""The command `mega-fairseq`: a folder for each large subcommand, and what they share."""


class UserError(Exception):
    """What the user has to change, in one sentence with the remedy; the command prints it and exits with code 1."""
