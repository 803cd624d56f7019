"""Chapters, the builder that fills them, and the small programs that answer their questions."""
