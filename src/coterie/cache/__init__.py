"""Paged storage of what the model keeps per token, and the bookkeeping of its pages."""
