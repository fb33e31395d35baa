"""`python -m flexcp`: the command line where the script `flexcp` is not on the path."""

import sys

from flexcp.cli import main

if __name__ == "__main__":
    sys.exit(main())
