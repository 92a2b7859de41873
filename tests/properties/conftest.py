"""Hypothesis profiles, chosen by HYPOTHESIS_PROFILE.

The default draws the same examples in every run, so that failures are reproducible. "fast" draws few examples, for
`make test-fast`; "explore" draws more and new ones.
"""

import os

from hypothesis import settings

settings.register_profile("repeatable", deadline=None, derandomize=True, max_examples=15, database=None)
settings.register_profile("fast", settings.get_profile("repeatable"), max_examples=3)
settings.register_profile("explore", deadline=None, max_examples=300, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))
