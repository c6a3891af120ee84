"""OpenAI Batch files against a server that also has people waiting: patient, resumable."""
