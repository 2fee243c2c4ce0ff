"""Text and ids: encodings, chat templates, tool calls, stop strings, grammars. Knows no tensor."""
