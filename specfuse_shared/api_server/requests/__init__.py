"""Requests: validated bodies, and their translation into calls of the engine."""
