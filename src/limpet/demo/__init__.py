"""Two demonstrations: the promises of the store in a terminal, and a server with plugins at work."""
