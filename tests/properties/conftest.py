"""One hypothesis profile: the same examples in every run, so that a red test is red for everyone.

HYPOTHESIS_PROFILE=explore draws new ones, and more of them.
"""

import os

from hypothesis import settings

settings.register_profile("repeatable", deadline=None, derandomize=True, max_examples=30, database=None)
settings.register_profile("explore", deadline=None, max_examples=300, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))
