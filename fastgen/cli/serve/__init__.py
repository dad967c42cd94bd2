"""fgserve: a server with OpenAI's API. All modules of this package need the extra `serve`."""

from __future__ import annotations

import sys

from fastgen.cli.command import needed, note


def command() -> int:
    """Run fgserve and return its exit status, which is 2 if the extra is not installed, and 130 after a Ctrl-C while
    its modules are imported."""
    try:
        main = needed("fastgen.cli.serve.main", "serve", "fgserve").command
    except ValueError as error:
        note("fgserve", f"error: {error}")
        return 2
    except KeyboardInterrupt:
        print(file=sys.stderr)  # the terminal has shown ^C
        return 130
    status: int = main()
    return status
