"""An OpenAI-compatible server over ensembles, with a chat page."""
