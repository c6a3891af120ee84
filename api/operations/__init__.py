"""What an operator sees: the request log, traces, metrics, the dashboard."""
