"""Members that this process runs: their sequences, shared forwards, lanes and speculation."""
