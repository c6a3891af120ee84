"""What both kinds of worker are started by and live by; what they do is each kind's own room."""
