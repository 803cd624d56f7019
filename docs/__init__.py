"""The chapters, the builder that fills in their outputs, and small programs that answer
questions."""
