"""`python -m fastgen.cli.serve`: fgserve, where its script is not on the path."""

import sys

from fastgen.cli.serve import command

sys.exit(command())
