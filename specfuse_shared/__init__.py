"""The shared engine: several causal language models of any family answer together, segment by segment."""
