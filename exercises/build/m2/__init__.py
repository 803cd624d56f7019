"""The course of M2: iteration-level scheduling."""
