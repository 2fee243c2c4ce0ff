"""What clients get: the events of an answer as OpenAI writes them, whole or streamed."""
