"""Tar archives: a parser without I/O, unpacking below a directory, and packing."""
