"""Members in this process: sequences, batched forward passes, lanes and speculation."""
