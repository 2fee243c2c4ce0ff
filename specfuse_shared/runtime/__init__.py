"""Ids in, logits out: forward passes of one model, its caches, kernels and samplers. Knows no text."""
