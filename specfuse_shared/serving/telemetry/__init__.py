"""What an engine counts, and a span for each answer."""
