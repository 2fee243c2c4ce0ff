"""The command `specfuse-llm` and what it shows in a terminal."""
