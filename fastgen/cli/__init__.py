"""The commands: fgchat, fggen and fgserve."""

from importlib.util import find_spec

if missing := [name for name in ("fcntl", "resource", "termios") if find_spec(name) is None]:
    raise ImportError(
        f"fgchat, fggen and fgserve need Python's {', '.join(missing)}, which Windows lacks; use WSL, or Generator in "
        "Python"
    )
