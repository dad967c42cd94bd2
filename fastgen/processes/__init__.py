"""Child processes: spawning, channels between processes, and errors that travel; and blocks that threads can stop."""
