"""Pages of a comparison: the report, and the blind vote."""
