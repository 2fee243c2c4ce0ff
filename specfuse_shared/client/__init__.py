"""An engine that talks to `specfuse-llm serve` and is used like a local one; and its wire format."""

MAX_RETRIES = 2
"""How often a request to a server is made again by default."""
