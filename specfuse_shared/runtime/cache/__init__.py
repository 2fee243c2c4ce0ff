"""Keys and values of many answers in one model, and what stays of recent ones."""
