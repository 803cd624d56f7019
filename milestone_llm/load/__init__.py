"""What clients get of a server at which rate: requests at random times, and their report."""
