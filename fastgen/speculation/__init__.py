"""Speculation: planning on the host (no torch), and the drafts on the device."""
