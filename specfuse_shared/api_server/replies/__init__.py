"""Responses: the events of an answer in OpenAI's formats, complete or streamed."""
