"""fastgen inside other programs that make data."""
