"""Connections and their limits, which apply to every client before anything is computed."""
