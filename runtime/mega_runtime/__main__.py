import sys

from mega_runtime.command import main

if __name__ == "__main__":
    sys.exit(main())
