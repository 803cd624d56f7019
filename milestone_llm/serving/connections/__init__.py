"""Connections and limits: what every client has to keep to before anything is computed."""
