"""Requests, plans, the step loop, sampling: what every milestone runs on."""
