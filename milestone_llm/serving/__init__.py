"""An OpenAI-compatible HTTP server over the engine of any milestone.

A request passes through four rooms, from the socket to the step:

    connections   who may connect, for how long, with which key and how large a body
    api           what a client asks and gets: JSON to token ids, tokens to text and events
    engine        the engine's process, the pipe to it, and the loop in it
    replicas      or, instead of that process, several engines on Ray with a router before them

`config.py` has the options; `command.py` and `server.py` put everything together. `timed.py` serves
an engine whose steps only sleep.
"""
