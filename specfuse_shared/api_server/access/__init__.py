"""Who may ask, how much, and over which connections."""
