"""Requests and answers of the API. All of it runs in HTTP's process, which loads no torch."""
