"""The ground floor: what no milestone changes. `engine` and `models` know nothing of the other rooms."""
