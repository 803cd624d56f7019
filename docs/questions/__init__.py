"""One small program a question: run it, change it, run it again."""
