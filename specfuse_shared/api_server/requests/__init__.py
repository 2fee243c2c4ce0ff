"""What clients send, checked, and as calls of the engine."""
