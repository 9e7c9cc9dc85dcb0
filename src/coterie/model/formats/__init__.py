"""Quantised storage formats, one file per family: stored bytes to `CodeRows` or float32 rows. No files, no names."""
