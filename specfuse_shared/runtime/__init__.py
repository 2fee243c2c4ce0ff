"""Ids in, logits out: the forwards of one model, its caches, kernels and samplers. Knows no text."""
