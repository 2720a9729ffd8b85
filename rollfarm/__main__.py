"""`python -m rollfarm` is `rollfarm`."""

import sys

from rollfarm.cli import main

if __name__ == "__main__":
    sys.exit(main())
