"""The composition root: config, Serve application, placement, CLI."""
