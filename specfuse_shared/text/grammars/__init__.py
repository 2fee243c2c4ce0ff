"""Answers held to a grammar: what it may be, how it is compiled, and how a value ends in time."""
