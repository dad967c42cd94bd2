"""`python -m fastgen.cli.serve` runs fgserve if its script is not on the PATH."""

import sys

from fastgen.cli.serve import command

sys.exit(command())
