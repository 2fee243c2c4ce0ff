"""An engine behind `specfuse-llm serve`, used like one in this process; and what crosses the wire."""

MAX_RETRIES = 2
"""How often a request to a server is made again by default."""
