"""Several engines behind one HTTP server, on Ray, and the router that chooses one."""
