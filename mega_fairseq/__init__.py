"""mega_fairseq: Mega, moving average equipped gated attention, for stock fairseq.

This file is the door. `mega_fairseq.ops` and `mega_fairseq.modules` are plain PyTorch and work in any
program: importing them, or this package, never imports fairseq. What registers itself with fairseq is
therefore imported here only when it is fairseq that knocks (`--user-dir`), that is, when fairseq is already
loaded. A program that is the first to import either asks for it: `import mega_fairseq.models`.
"""

import sys

__version__ = "0.1.0"

if "fairseq" in sys.modules:
    import mega_fairseq.criterions
    import mega_fairseq.models
    import mega_fairseq.tasks  # noqa: F401
