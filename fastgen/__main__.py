"""`python -m fastgen chat`, `gen` or `serve` runs fgchat, fggen or fgserve if their scripts are not on the PATH."""

import runpy
import sys

COMMANDS = ("chat", "gen", "serve")

if sys.argv[1:2] == ["--help"]:
    print(__doc__)
elif sys.argv[1:2] and sys.argv[1] in COMMANDS:
    runpy.run_module(f"fastgen.cli.{sys.argv.pop(1)}", run_name="__main__", alter_sys=True)
else:
    print(f"python -m fastgen takes {', '.join(COMMANDS)}, and then the options of that command", file=sys.stderr)
    sys.exit(2)
