"""An OpenAI-compatible HTTP server over the engine of any milestone."""
