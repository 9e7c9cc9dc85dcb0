"""Training: a recipe file and one command make a small DeepSeek-V3-style model; nothing here is imported by serving."""
