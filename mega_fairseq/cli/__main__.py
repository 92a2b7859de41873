"""`python -m mega_fairseq.cli`, the same as `mega-fairseq`."""

import sys

from mega_fairseq.cli.main import main

sys.exit(main())
