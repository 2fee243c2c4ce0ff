"""The command `specfuse-llm` and its terminal output."""
