"""What a model needs and what a machine gives, on paper: `relevo plan`."""
