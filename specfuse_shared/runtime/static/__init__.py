"""Static execution: steps of fixed shape, which CUDA graphs replay."""
