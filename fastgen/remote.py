"""The home of RemoteGenerator in 0.1; import it from fastgen.rl.remote."""

from fastgen.rl.remote import RemoteGenerator as RemoteGenerator
