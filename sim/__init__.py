"""A cluster on paper: the router's own code over simulated workers, links and time."""
