"""`python -m fewlabel` is the command `fewlabel`."""

import sys

from fewlabel.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
