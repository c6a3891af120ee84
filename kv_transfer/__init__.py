"""The data plane: links between workers and the KV that travels over them."""
