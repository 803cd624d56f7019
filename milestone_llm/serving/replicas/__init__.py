"""Several engines for one HTTP server, on Ray, and the router that chooses one for each request."""
