"""mega_fairseq: Mega, moving average equipped gated attention, for stock fairseq.

This is the entry point. `mega_fairseq.ops` and `mega_fairseq.modules` are plain PyTorch: importing them, or this
package, never imports fairseq. Models, tasks and criteria register with fairseq when they are imported. That happens
here if fairseq is already loaded, as it is for `--user-dir`; other programs import them by name, as in
`import mega_fairseq.models`.
"""

import sys

__version__ = "0.1.0"

if "fairseq" in sys.modules:
    import mega_fairseq.criterions
    import mega_fairseq.models
    import mega_fairseq.optim
    import mega_fairseq.tasks  # noqa: F401
