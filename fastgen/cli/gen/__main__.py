"""`python -m fastgen.cli.gen` runs fggen if its script is not on the PATH."""

import sys

from fastgen.cli.gen.main import main

sys.exit(main())
