"""One language model as a member of an ensemble: its drafts, its verdicts, its sequence in the cache."""
