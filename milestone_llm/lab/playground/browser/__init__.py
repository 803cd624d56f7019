"""The playground without a server of its own: Python runs in the reader's browser."""
