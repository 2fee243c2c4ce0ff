"""Grammars of answers: their kinds, their compilation, and the end of a value within `max_tokens`."""
