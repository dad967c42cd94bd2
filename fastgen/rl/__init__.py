"""For trainers: a Generator in a server (`remote`), and a trainer with a Generator's bits (`policy`)."""
