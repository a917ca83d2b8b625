"""`python -m hvkeras`: the command `hvkeras`."""

from __future__ import annotations

import sys

from hvkeras.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
