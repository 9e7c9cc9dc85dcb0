"""Load against any OpenAI-compatible server: connections, prompts of real text, arrivals, and what users saw."""
