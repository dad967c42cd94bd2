"""Attention over the paged KV pool: one interface, three implementations."""
