"""The answers of all: asked once, many at a time, and kept in a file."""
