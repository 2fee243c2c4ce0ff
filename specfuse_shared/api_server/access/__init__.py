"""Access control: keys, limits of clients, and limits of connections."""
