"""A member whose model a server runs: drafts and verdicts by requests, text and templates here."""
