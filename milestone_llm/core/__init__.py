"""What a step is, in tokens: requests, plans, the base of the schedulers, the step, sampling."""
