"""Child processes: spawning, channels between processes, and errors that travel."""
