"""Lanes in other processes and on other machines."""
