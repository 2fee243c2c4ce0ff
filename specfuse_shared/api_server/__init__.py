"""An OpenAI-compatible server over ensembles: one loaded engine for any client, in any language, and a page."""
