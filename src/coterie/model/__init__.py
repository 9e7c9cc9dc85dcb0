"""The decoder stack as one generator, its attention blocks, and the loader that fills it."""
