"""An engine behind `specfuse-llm serve`, used like one in this process; and what crosses the wire."""
