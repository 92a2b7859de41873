"""Profiles of hypothesis, chosen by HYPOTHESIS_PROFILE.

The default draws the same examples in every run, so that failures are reproducible. "fast" draws few examples, for
`make test-fast`; "explore" draws more and new ones.
"""

import os

from hypothesis import settings

EXAMPLES = 12
settings.register_profile("repeatable", deadline=None, derandomize=True, max_examples=EXAMPLES, database=None)
settings.register_profile("fast", settings.get_profile("repeatable"), max_examples=3)
settings.register_profile("explore", deadline=None, max_examples=300, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))


def examples(count: int) -> settings:
    """Draws `count` examples in the default profile, and fewer or more in the others."""
    return settings(max_examples=max(1, count * settings.default.max_examples // EXAMPLES))
