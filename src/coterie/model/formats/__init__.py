"""Quantised storage formats, one file per family: stored bytes to `Codes` and to float32 rows. No files, no names."""
