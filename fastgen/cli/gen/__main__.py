"""`python -m fastgen.cli.gen`: fggen, where its script is not on the path."""

import sys

from fastgen.cli.gen.main import main

sys.exit(main())
