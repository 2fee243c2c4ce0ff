"""Requests: checked bodies, and their translation into calls of the engine."""
