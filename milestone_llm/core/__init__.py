"""The step, in tokens: requests, plans, the base of the schedulers, the engine core, sampling."""
