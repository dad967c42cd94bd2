"""For trainers elsewhere: a Generator in a server."""

from fastgen.rl import fleet as fleet  # makes a RemoteGenerator of several addresses possible
