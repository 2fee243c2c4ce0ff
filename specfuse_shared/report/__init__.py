"""A result explained as one HTML file."""
