"""The ground floor: what no milestone changes."""
