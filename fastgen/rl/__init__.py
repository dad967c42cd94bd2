"""For trainers elsewhere: a Generator in a server."""
